"""Getting the data: downloads, packages, and writing arrays and shards."""
