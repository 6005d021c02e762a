"""Entry points of tasks started by a scheduler: Kubernetes (`pod.py`), Slurm (`slurm.py`) or Swarm (`service.py`).

Each determines its task, prepares the run folder, and then runs the agent of `cluster/agent`. `health.py` is the health
check with which an engine examines a task's container.
"""
