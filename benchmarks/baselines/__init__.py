"""Baselines for our runs, written by hand as in the tutorials; nothing here imports `cluster` or `train`."""
