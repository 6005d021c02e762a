"""The training loops: around, outer, inner."""
