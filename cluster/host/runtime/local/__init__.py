"""Local processes: `runtime.py` is the runtime, `supervisor.py` starts and restarts the tasks."""
