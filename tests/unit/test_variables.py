"""The environment variables that TensorFlow reads while it is imported."""

from __future__ import annotations

import os

import pytest

from train import variables


@pytest.mark.parametrize("name", variables.DEFAULTS)
def test_what_the_user_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`TF_ENABLE_ONEDNN_OPTS=0 invoke up` must go without."""
    for other in variables.DEFAULTS:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "0")
    variables.set_defaults()
    assert {other: os.environ[other] for other in variables.DEFAULTS} == {**variables.DEFAULTS, name: "0"}


def test_onednn_is_on() -> None:
    """A step takes twice as long without, on processors for which TensorFlow leaves it off."""
    assert variables.DEFAULTS["TF_ENABLE_ONEDNN_OPTS"] == "1"
