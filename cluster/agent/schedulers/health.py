"""The health check of containers: whether this task's heartbeat is recent. Prints one line, exits with 0 or 1.

python -m cluster.agent.schedulers.health     RUN_DIR and TASK in the environment
"""

import os
import sys
from pathlib import Path

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import read_live_heartbeats
from cluster.contract.run.records import TaskState


def describe_health(run: RunFolder, task: str) -> tuple[bool, str]:
    """Return whether the task is healthy, and its state in words."""
    beat = read_live_heartbeats(run, task).get(task)
    if beat is None:
        return False, f"{task} has no heartbeat yet"
    return beat.state not in (TaskState.LOST, TaskState.FAILED), f"{task} is {beat.state} at step {beat.step}"


if __name__ == "__main__":
    healthy, state = describe_health(RunFolder(Path(os.environ["RUN_DIR"])), os.environ["TASK"])
    print(state)
    sys.exit(0 if healthy else 1)
