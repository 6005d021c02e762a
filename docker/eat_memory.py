"""Eat memory, 16 MiB at a time, until a program is gone: the kernel kills the largest process first.

`chaos oom` runs it in the program's container: `python -c TEXT PID PIECES`.
"""

import os
import sys

eaten, program, pieces = [], int(sys.argv[1]), int(sys.argv[2])
while os.path.exists(f"/proc/{program}") and len(eaten) < pieces:  # noqa: PTH110  # imports next to nothing
    eaten.append(b"x" * 2**24)
