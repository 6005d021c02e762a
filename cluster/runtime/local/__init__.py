"""Local processes: `runtime.py` is the runtime, `supervisor.py` starts the tasks and brings them back."""
