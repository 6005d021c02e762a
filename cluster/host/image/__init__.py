"""Container images: their inputs, builds and comparison."""
