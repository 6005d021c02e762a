"""Failures: their causes, the limits of attempts without progress, and the cost of each restart."""
