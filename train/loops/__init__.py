"""The training loops: the loop around a generation, the outer and the inner loop."""
