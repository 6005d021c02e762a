"""Keras is imported without matplotlib and IPython, which takes more than half a second less.

Defect: Keras imports them, where they are installed, to be able to draw. No task draws.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_quick_imports.py
Not applied: to those that are imported already.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

DRAWING = ("matplotlib", "IPython")


@contextmanager
def quick_imports() -> Iterator[None]:
    """Hide `DRAWING` from imports inside, and do not collect garbage among modules, which stay anyway.

    Later imports of `DRAWING`, such as those of the user's modules, work.
    """
    hidden = [name for name in DRAWING if name not in sys.modules]
    sys.modules |= dict.fromkeys(hidden)  # type: ignore[arg-type]  # None: Python regards it as not installed
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        for name in hidden:
            del sys.modules[name]
