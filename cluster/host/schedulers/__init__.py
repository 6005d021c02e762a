"""Runtimes whose tasks are placed by a scheduler: Slurm and Docker Swarm."""
