"""Container images: their inputs, how they are built, and how two are compared."""
