"""Training data: its sources, its preparation, and the reading of each step's part."""
