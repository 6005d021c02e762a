"""Runs the Python code in its argument: `python -c` as a module, which can be forked."""

import sys

exec(sys.argv[1])
