"""What the chief records of each generation, for tests that leave such records."""

from typing import Any

LEDGER: dict[str, Any] = {
    "generation": 0,
    "began": 1.0,
    "first_step_at": 1.0,
    "first": 0,
    "updated_at": 1.0,
    "step": 1,
    "timed_steps": 1,
    "seconds": {"input": 0.0, "compute": 4.0, "save": 1.0, "evaluate": 0.0},
}
"""What the chief records of one generation."""
