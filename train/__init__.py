"""The training program of a task, for every role and strategy."""
