"""The training loops: the loop with its actions, and the steps that it calls."""
