"""The task collections, one module each. What they do is in the packages below; here are options and help."""
