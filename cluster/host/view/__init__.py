"""Output for a terminal: the status of a run, its live view, its result and its logs; tables and signals."""
