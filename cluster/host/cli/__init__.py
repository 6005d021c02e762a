"""The command line: the parts that all tasks share. The tasks themselves are in `tasks/` and in `tasks.py`."""
