"""TensorFlow's import without the lines that it prints whatever its log level."""

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
