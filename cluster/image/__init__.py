"""The container images: what they are made of, how they are built and compared."""
