"""A dataset as a function of (split, shard), which each task calls and reads: `--source function`."""
