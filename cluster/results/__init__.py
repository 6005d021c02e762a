"""What is computed from a run's records: its summary, where the time went, who is slow."""
