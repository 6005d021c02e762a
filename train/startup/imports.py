"""Importing TensorFlow and Keras, which is most of what a task's start takes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

DRAWING = ("matplotlib", "IPython")
"""Where these are installed Keras imports them to be able to draw, which no task does: half a second and more."""


@contextmanager
def quick() -> Iterator[None]:
    """Import what is imported meanwhile without `DRAWING`, and without a search for garbage among what stays anyway.

    Whoever imports those later, such as a module of the user's own, gets them.
    """
    hidden = [name for name in DRAWING if name not in sys.modules]
    sys.modules |= dict.fromkeys(hidden)  # type: ignore[arg-type]  # None: Python takes it for not installed
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        for name in hidden:
            del sys.modules[name]
