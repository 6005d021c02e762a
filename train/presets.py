"""The built-in presets: functions that return a complete configuration."""

from __future__ import annotations

from collections.abc import Callable

from train.config import Optimizer, TrainConfig, Transformer


def fashion_mnist() -> TrainConfig:
    """Fashion-MNIST with the two-conv CNN: above 0.88 accuracy after 3 epochs."""
    return TrainConfig()


def mnist() -> TrainConfig:
    """MNIST with the two-conv CNN."""
    return TrainConfig(preset="mnist", dataset="mnist")


def resnet50_synthetic() -> TrainConfig:
    """ResNet-50 v1.5 on made-up images, to see how many of them a machine trains on in a second."""
    return TrainConfig(
        preset="resnet50_synthetic",
        dataset="train.data.synthetic:imagenet",
        model="resnet50",
        epochs=10**6,
        max_steps=500,
        steps_per_loop=10,
        checkpoint_every=10**9,  # what is measured is training alone
        evaluate_every=10**9,
        optimizer=Optimizer(name="sgd", learning_rate=0.1, scaling="linear", base_batch=256),
    )


def transformer_lm() -> TrainConfig:
    """A decoder-only Transformer on the bytes of the Jargon File: below the perplexity of trigrams after 1000 steps."""
    return TrainConfig(
        preset="transformer_lm",
        dataset="jargon_file",
        model="transformer_lm",
        global_batch=16,
        epochs=1.0,
        transformer=Transformer(context=64),
    )


def cifar10_resnet() -> TrainConfig:
    """CIFAR-10 with ResNet-20 by TFDS's shards, in the batch and the decays of He et al. 2015. Not verified on it."""
    return TrainConfig(
        preset="cifar10_resnet",
        source="stream",
        dataset="cifar10",
        model="resnet20",
        global_batch=128,
        epochs=160.0,
        optimizer=Optimizer(
            name="sgd",
            learning_rate=0.1,
            warmup_steps=400,
            schedule="cosine",
            nesterov=True,
            weight_decay=5e-4,
            no_decay="bias,gamma,beta",
        ),
    )


PRESETS: dict[str, Callable[[], TrainConfig]] = {
    preset.__name__: preset for preset in (fashion_mnist, mnist, cifar10_resnet, resnet50_synthetic, transformer_lm)
}
