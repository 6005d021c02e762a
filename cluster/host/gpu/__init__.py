"""This machine's GPUs, and which task gets which."""
