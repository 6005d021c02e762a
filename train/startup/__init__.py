"""What is imported and rehearsed before a run begins."""
