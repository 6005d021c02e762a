"""The operating system: files, processes, namespaces, cgroups. Knows nothing of runs."""
