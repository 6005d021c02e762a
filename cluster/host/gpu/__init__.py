"""This machine's GPUs, and their placement on tasks."""
