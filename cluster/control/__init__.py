"""What is done with a run in progress: watch, scale, trace it, inject faults."""
