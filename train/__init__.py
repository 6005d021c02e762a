"""What runs in a task: one training program for every role and strategy."""
