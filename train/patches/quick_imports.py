"""Keras is imported without matplotlib and IPython, which saves more than half a second.

Defect: Keras imports them for plotting if they are installed. No task plots.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_quick_imports.py
Not applied: to modules that have been imported already.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

DRAWING = ("matplotlib", "IPython")


@contextmanager
def quick_imports() -> Iterator[None]:
    """Hide `DRAWING` from imports inside, and suspend garbage collection, because modules stay in memory anyway.

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
