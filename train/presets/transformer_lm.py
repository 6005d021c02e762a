"""A decoder-only Transformer on the bytes of the Jargon File."""

from train.config import TrainConfig, Transformer


def preset() -> TrainConfig:
    """Return the configuration."""
    return TrainConfig(
        dataset="jargon_file", model="transformer_lm", global_batch=16, epochs=1.0, transformer=Transformer(context=64)
    )
