"""Reports of a task about its training."""
