"""The command line: what every task of `tasks.py` shares, and the task collections."""
