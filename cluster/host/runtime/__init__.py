"""What runs tasks: a module for each runtime, such as `local_runtime`, and objects for Kubernetes.

`base.py` is the protocol of a runtime and `registry.py` their table. Code outside never asks which runtime it has.
"""
