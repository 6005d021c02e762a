"""Containers of Docker Compose: `runtime.py` is the runtime, `overlay.py` describes the services."""
