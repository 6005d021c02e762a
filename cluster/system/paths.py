"""The path of this checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the checkout, or of the code in a container."""
