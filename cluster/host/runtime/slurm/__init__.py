"""Jobs of a Slurm site: `runtime.py` is the runtime, `batch.py` the script that is queued."""
