"""Starts and supervises a cluster of TensorFlow tasks: commands, agents, run records. Never imports TensorFlow."""
