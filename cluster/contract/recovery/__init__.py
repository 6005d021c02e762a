"""Failures: their causes, how many attempts without progress end a run, and what each restart cost."""
