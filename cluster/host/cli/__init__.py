"""The command line: what all tasks share. The tasks themselves are in `tasks/` and in `tasks.py`."""
