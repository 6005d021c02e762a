"""Operating-system utilities: files, processes, memory, ports, messages. Independent of runs."""
