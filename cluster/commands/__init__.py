"""The tasks in namespaces: `invoke image.build` is `build` in `image`. Those without one are in `tasks.py`."""
