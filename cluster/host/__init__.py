"""What you type, on the machine where you type it: commands, plans, runtimes, checks, views."""
