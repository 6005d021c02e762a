"""The operating system: files, processes, memory, namespaces, signals. Knows nothing about runs."""
