"""The parts of a configuration, which `train/config.py` combines: checked fields, references, overrides.

Nothing here imports TensorFlow.
"""
