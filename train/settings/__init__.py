"""What a configuration is made of: checked fields, names of parts, overrides; `train/config.py` puts it together.

Nothing here imports TensorFlow.
"""
