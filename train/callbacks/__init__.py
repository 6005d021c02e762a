"""Keras callbacks: made by the user's function, called from both loops, saved in checkpoints."""
