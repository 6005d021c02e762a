"""What is shown in a terminal: the status of a run, its live view, its end, its logs; plans and findings."""
