"""The parts of a configuration, for `train/config.py`: fields, references, overrides. None imports TensorFlow."""
