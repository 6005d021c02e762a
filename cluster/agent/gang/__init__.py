"""The messages of agents over one connection each to the chief's agent; the run folder stays the record.

Only hints travel here, each with its value and its generation. Without a connection an agent reads the folder as often
as it needs to; with one it does so every two seconds. Nothing here imports TensorFlow or the host's side.
"""
