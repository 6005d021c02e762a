"""Checkpoints: their files, when they are saved, and how they are restored."""
