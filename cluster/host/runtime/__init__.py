"""The runtimes, which run tasks: `base.py` has their interface, `registry.py` their table."""
