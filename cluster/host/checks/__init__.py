"""Checks of the machine, of strategies and of finished runs."""
