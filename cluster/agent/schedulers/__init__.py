"""Entry points of tasks that a scheduler starts: of Kubernetes (`pod.py`), Slurm (`slurm.py`) and Swarm (`service.py`).

Each finds out which task it is, prepares the run folder, and then runs the agent of `cluster/agent`.
"""
