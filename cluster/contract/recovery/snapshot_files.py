"""The in-memory files in which a task's program keeps snapshots of its state, see `train/saving/snapshots.py`.

The agent creates the files and every program of the task inherits them, so they exist as long as the agent. They have
no names: nothing is left behind, and no other user can open them.
"""

import os
from collections.abc import Mapping

VARIABLE = "SNAPSHOT_FILES"
"""The environment variable with the descriptors of the files."""


def create() -> str:
    """Create two files, so that one is complete while the other is being written; return the value of `VARIABLE`."""
    return ",".join(str(os.memfd_create(f"snapshot-{number}")) for number in range(2))


def descriptors(environment: Mapping[str, str]) -> tuple[int, ...]:
    """Return the descriptors; none without an agent, or in a task that keeps no snapshots."""
    return tuple(int(number) for number in environment.get(VARIABLE, "").split(",") if number)
