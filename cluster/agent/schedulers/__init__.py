"""Entry points of tasks that a scheduler starts: `pod.py` in Kubernetes, `slurm.py` in a Slurm job.

Each finds out which task it is, prepares the run folder, and then runs the agent of `cluster/agent`.
"""
