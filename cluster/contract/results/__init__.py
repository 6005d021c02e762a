"""Results computed from a run's records: its summary, where the time went, slow tasks, comparison of bits."""
