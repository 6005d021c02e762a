"""What runs tasks, a package each: `local`, `compose`, `slurm`; `kubernetes` renders manifests.

`base.py` is the protocol of a runtime and `registry.py` their table. Code outside never asks which runtime it has.
"""
