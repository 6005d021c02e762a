"""Suppresses lines that TensorFlow prints at every log level."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from cluster.system.messages import NOISE


@contextlib.contextmanager
def redirected(targets: Mapping[int, int]) -> Iterator[None]:
    """Context manager that redirects standard output, 1, or error, 2, to other descriptors, even for native code."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

    flush()
    own = {number: os.dup(number) for number in targets}
    for number, target in targets.items():
        os.dup2(target, number)
    try:
        yield
    finally:
        flush()
        for number, kept in own.items():
            os.dup2(kept, number)
            os.close(kept)


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Context manager that holds back stderr, and prints all except the noise at the end."""
    with tempfile.TemporaryFile() as held:
        try:
            with redirected({2: held.fileno()}):
                yield
        finally:
            held.seek(0)
            for line in held:
                if not any(part in line for part in NOISE):
                    os.write(2, line)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Context manager that discards the output of this process, including that of native code."""
    with Path(os.devnull).open("wb") as nowhere, redirected({1: nowhere.fileno(), 2: nowhere.fileno()}):
        yield
