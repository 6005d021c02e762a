"""What `doctor` finds on a machine with GPUs: the host, the image from inside, and the bandwidth between GPUs."""
