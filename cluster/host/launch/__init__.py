"""Planning, starting, resuming and removing runs."""
