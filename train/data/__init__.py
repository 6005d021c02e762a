"""Where the training data comes from, how it is prepared once, and how each step reads its part of it."""
