"""Renew requirements/*.lock from requirements/*.in.

python -m tests.tools.lock [--upgrade]
"""

import subprocess
import sys

from cluster.host.image import locks
from cluster.system.files import ROOT

# Universal: one lock for every platform and every Python from 3.11 on.
_COMPILE = [
    *("uv", "pip", "compile", "--quiet", f"--config-file={locks.DIRECTORY}/uv.toml", "--universal"),
    *("--python-version=3.11", "--no-emit-index-url"),
    "--custom-compile-command=python -m tests.tools.lock",
]


def lock_commands(*, upgrade: bool = False) -> list[list[str]]:
    """Return the commands that renew every lock, in order; run them from the repository root.

    All targets are resolved together first, so that any of them can share an environment.
    """
    sources = [f"{locks.DIRECTORY}/{target}.in" for target in locks.TARGETS]
    resolve = [*_COMPILE, "--no-annotate", *(["--upgrade"] if upgrade else []), f"--output-file={locks.CONSTRAINTS}"]
    lock = [*_COMPILE, "--annotation-style=line", "--generate-hashes", f"--constraints={locks.CONSTRAINTS}"]
    return [
        [*resolve, *sources],
        *(
            [*lock, f"--output-file={locks.DIRECTORY}/{target}.lock", f"{locks.DIRECTORY}/{target}.in"]
            for target in locks.TARGETS
        ),
    ]


if __name__ == "__main__":
    for command in lock_commands(upgrade="--upgrade" in sys.argv[1:]):
        subprocess.run(command, cwd=ROOT, check=True)
