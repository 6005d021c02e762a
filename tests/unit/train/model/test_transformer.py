"""The Transformer sees no token that comes later and has the size that its options say."""

import numpy as np
import pytest

from cluster.system.errors import UsageError
from train.config import TrainConfig, Transformer
from train.model import input_types, models
from train.model.architectures import transformer_lm
from train.settings.overrides import resolve_config


@pytest.mark.slow
def test_no_output_depends_on_a_later_token():
    model = transformer_lm((6,), 11, layers=2, width=8, heads=2)
    tokens = np.array([[1, 2, 3, 4, 5, 6]], np.int32)
    changed = tokens.copy()
    changed[0, 4] = 9
    one, other = model(tokens).numpy(), model(changed).numpy()
    assert one[:, :4].tobytes() == other[:, :4].tobytes()
    assert not np.array_equal(one[:, 4:], other[:, 4:])


@pytest.mark.slow
def test_options_set_the_size():
    config = TrainConfig(model="transformer_lm", transformer=Transformer(layers=3, width=16, heads=2))
    model = models.build_configured(config, (8,), 256)
    attention, feed_forward, norms = 4 * 16 * 16 + 4 * 16, 2 * 64 * 16 + 64 + 16, 2 * 2 * 16
    embedding, logits = 256 * 16 + 8 * 16, 256 * 16 + 256 + 2 * 16
    assert 3 * (attention + feed_forward + norms) + embedding + logits == model.count_params()
    assert ("int32", (None, 8, 256)) == (input_types.input_dtypes(model, ()), model.output_shape)


def test_examples_must_be_sequences():
    with pytest.raises(UsageError):
        transformer_lm((28, 28, 1), 10)


@pytest.mark.parametrize(
    "words",
    [("--transformer.width", "10"), ("--transformer.context", "100"), ("--transformer.layers", "0")],
)
def test_a_size_that_cannot_be_is_refused(words):
    resolve_config("transformer_lm", ["--transformer.layers", "2"])
    with pytest.raises(UsageError):
        resolve_config("transformer_lm", words)
