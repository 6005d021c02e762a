"""Commands import TensorFlow without its noise; other output is shown."""

import os
import sys

import pytest

from cluster.system import quiet
from cluster.system.messages import NOISE


def test_the_noise_is_left_out_and_nothing_else(capfd):
    with quiet.imports():
        for part in NOISE:
            os.write(2, b"I0000 00:00:1 7 port.cc:153] " + part + b" More.\n")
        print("their warning", file=sys.stderr)
        os.write(2, b"no line break")
    os.write(2, b", and on\n")
    assert "their warning\nno line break, and on\n" == capfd.readouterr().err


@quiet.imports()
def cannot_import() -> None:
    os.write(2, b"cannot open a library\n")
    raise ImportError


def test_what_was_printed_before_an_error_is_shown(capfd):
    with pytest.raises(ImportError):
        cannot_import()
    assert "cannot open a library\n" == capfd.readouterr().err
