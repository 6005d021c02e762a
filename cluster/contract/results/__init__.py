"""Results computed from a run's records: the summary, the goodput, slow tasks, the comparison of bits."""
