"""The queue of a Slurm site, as its controller describes it.

Slurm's clients wait about 9 s for a controller that does not answer. So a question that failed is not asked again for a
while, however many runs a command looks at.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.system import processes
from cluster.system.errors import PrerequisiteError
from cluster.system.messages import last_output_line

ANSWER_S = 30.0
CHECK_S = 5.0
"""Longest wait for an answer that is only looked at: a client gives up after about 9 s."""
RETRY_S = 60.0
NOT_INSTALLED = (126, 127)
"""Exit codes of a command that is not there."""
IN_PROGRESS = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "SUSPENDED"}
    | {"SIGNALING", "STAGE_OUT", "STOPPED", "SPECIAL_EXIT", "PREEMPTED", "NODE_FAIL"}
)
"""States of a job that runs, or is queued again at once, as after its preemption or the loss of a node."""
IN_USE = frozenset({"idle", "allocated", "mixed", "completing", "planned", "reserved"})
"""States of nodes that are not away."""
UNAVAILABLE = "node configuration is not available"
TEMPORARY = ("contact", "timed out", "temporarily", "busy")
"""Parts of what Slurm complains of where nothing is wrong with the job."""


@dataclass(frozen=True)
class JobState:
    """What the controller says of a job, in its own words."""

    number: str
    state: str
    reason: str
    """Why it is queued, or has ended."""
    node: str
    """Where its script runs or ran; empty where it never did."""


class Queue:
    """The queue of a Slurm site."""

    def __init__(self) -> None:
        self._failure: tuple[float, tuple[int, str, str]] | None = None
        """When the controller failed to answer, and what its client returned."""

    def jobs(self, name: str = "", *, parts: bool = False) -> dict[str, str]:
        """Return the names of this user's jobs that are in progress, by their numbers, all or those of a name.

        With `parts` its parts are included, whose names begin with it and a dot.
        """
        words = ["squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%j"]
        code, printed, complained = self._ask([*words, *([f"--name={name}"] if name and not parts else [])])
        if code:
            raise PrerequisiteError(f"Slurm does not answer: {last_output_line(complained)}")
        rows = (line.split("|", 2) for line in printed.splitlines() if line.count("|") >= 2)
        found = {number: called for number, state, called in rows if state in IN_PROGRESS}
        if parts:
            return {number: called for number, called in found.items() if f"{called}.".startswith(f"{name}.")}
        return found

    def newest(self, name: str) -> JobState | None:
        """Return the state of the newest job of a name; None where the controller knows none, or does not answer.

        It forgets a job some minutes after its end.
        """
        command = ["squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r|%B", f"--name={name}"]
        _, printed, _ = self._ask(command)
        rows = [line.split("|") for line in printed.splitlines() if line.count("|") == 3]
        if not rows:
            return None
        number, state, reason, node = max(rows, key=lambda row: int(row[0]) if row[0].isdecimal() else 0)
        return JobState(number, state, reason, "" if node == "n/a" else node)

    def nodes(self, timeout_s: float = ANSWER_S) -> tuple[int, str, str]:
        """Return the exit code of `sinfo`, a line for each state of nodes, and the errors that it printed."""
        return self._ask(["sinfo", "--noheader", "--format=%D %T"], timeout_s)

    def refusal(self, options: Sequence[str]) -> str:
        """Return why Slurm would never take a job with these options; empty where it would, perhaps later."""
        code, _, complained = processes.run(["sbatch", "--test-only", *options, "--wrap=true"], ANSWER_S)
        why = last_output_line(complained).removeprefix("sbatch: error: ").removeprefix("allocation failure: ")
        if not code or any(word in why for word in TEMPORARY):
            return ""
        if UNAVAILABLE in why and any(line.split()[-1] not in IN_USE for line in self.nodes()[1].splitlines()):
            return ""  # a node that is down may be what is missing
        return why

    def _ask(self, command: list[str], timeout_s: float = ANSWER_S) -> tuple[int, str, str]:
        if self._failure and time.monotonic() - self._failure[0] < RETRY_S:
            return self._failure[1]
        answer = processes.run(command, timeout_s)
        self._failure = (time.monotonic(), answer) if answer[0] not in (0, *NOT_INSTALLED) else None
        return answer
