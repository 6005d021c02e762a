"""The runtimes, which run tasks: a module for each, such as `local_runtime`; others are in `cluster/host/schedulers`.

`base.py` has the interface of a runtime and `registry.py` their table. Code outside never checks for a runtime's name.
"""
