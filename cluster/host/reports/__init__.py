"""Reports about runs: the table of all runs, their differences, a page about one run. Never changes run folders."""
