"""The part on the user's machine: commands, plans, runtimes, checks, views."""
