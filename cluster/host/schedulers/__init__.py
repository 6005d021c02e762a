"""Runtimes whose tasks run where a scheduler places them: a Slurm site, a Docker Swarm."""
