"""Reports about runs: a table of them, their differences, a page about one. Reads run folders and changes none."""
