"""What TensorFlow prints whatever its log level, held back."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

from cluster.messages import NOISE


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Hold back what is printed on stderr, and print all but the noise at the end."""
    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            held.seek(0)
            for line in held:
                if not any(part in line for part in NOISE):
                    os.write(2, line)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Throw away what this process prints, below Python, too."""
    own = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, kept in zip((1, 2), own, strict=True):
            os.dup2(kept, number)
            os.close(kept)
