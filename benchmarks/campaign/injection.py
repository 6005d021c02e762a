"""Injects the volleys of a run: waits for the phase of each fault, and undoes lasting ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.campaign import volleys
from benchmarks.campaign.volleys import AGENT, ENDING, LAST_PHASES, PHASES, Shot, Volley
from cluster.contract.recovery import step_record
from cluster.contract.recovery.step_record import RecordedStep
from cluster.contract.run.folder import RunFolder
from cluster.host.runtime import registry
from cluster.host.runtime.base import FaultInjector
from cluster.host.runtime.compose_runtime import ContainerFaults
from cluster.system import processes
from cluster.system.errors import ClusterError
from cluster.system.waiting import wait_until

POLL_S = 0.002
RECOVERY_S = 60.0
"""Longest wait until the run trains again."""
PHASE_S = 3.0
"""Longest wait for a phase while the run trains or recovers; then the fault is injected in any phase."""
PROCESS_S = 2.0
"""Longest wait for the target process of a fault."""
RECOVERED_STEPS = 10
"""New steps that show that the run has recovered: more than an inner call does, which may end after a fault."""
CLOSING_STEPS = 40
"""Number of steps before the run's last one at which its last volleys begin."""
SCRIPT_PHASES = ("start", "rendezvous", "step")
"""The phases in the heartbeat of a script, which its agent writes."""
LAST_STEPS_S = 60.0
CLOSING_VOLLEYS = 3


class Injection:
    """Injects volley after volley into one run.

    Attributes:
        faults: a record of each: kind, task, phase and step.
    """

    def __init__(self, run: RunFolder, drawn: Iterator[tuple[Volley, Volley]], most: int) -> None:
        self.faults: list[dict[str, Any]] = []
        self._run, self._drawn, self._left = run, drawn, most
        self._closing = CLOSING_VOLLEYS
        self._ending = ""
        self._synchronous = run.load_cluster().kind.synchronous
        self._lasting = _Lasting()

    def inject(self, deadline: float, last_deadline: float) -> None:
        """Inject volleys until the run ends, or enough were injected.

        Args:
            deadline: monotonic time after which faults are injected only at the run's end.
            last_deadline: monotonic time after which none are injected.
        """
        try:
            while self._left and time.monotonic() < deadline and not (self._ended or self._near_the_end):
                self._left -= 1
                self._inject(next(self._drawn)[0], last_deadline, closing=False)
            while self._closing and not self._run.script and not self._over(last_deadline):
                self._await(lambda: self._near_the_end, LAST_STEPS_S)
                if not self._near_the_end:
                    return
                self._closing -= 1
                self._inject(next(self._drawn)[1], last_deadline, closing=True)
        finally:
            self._lasting.end()

    def take_ending(self) -> str:
        """Return and clear the kind of the newest run-ending fault; empty if there is none."""
        kind, self._ending = self._ending, ""
        return kind

    @property
    def _near_the_end(self) -> bool:
        beat = self._run.heartbeat("chief")
        total = beat.steps_total if beat else None
        return total is not None and self._progress.step > total - CLOSING_STEPS

    @property
    def _progress(self) -> RecordedStep:
        """The newest step, by the chief's own record: its heartbeat is up to a second old."""
        return step_record.read_step(self._run, "chief") or RecordedStep(0, 0)

    @property
    def _ended(self) -> bool:
        return self._run.summary.exists()

    def _over(self, deadline: float) -> bool:
        return self._ended or time.monotonic() > deadline

    def _inject(self, volley: Volley, deadline: float, *, closing: bool) -> None:
        self._await_training(volley, closing=closing)
        for shot in volley.shots:
            first = shot is volley.shots[0]
            self._lasting.wait(shot.after_s)
            if shot.phase:
                self._await_phase(shot, first=first)
            self._await(partial(self._reaches, shot), PROCESS_S)
            if self._over(deadline):
                return
            if record := self._shoot(shot):
                self.faults.append(record)

    def _await_training(self, volley: Volley, *, closing: bool) -> None:
        """Wait until the run has recovered and done some new steps."""
        run, before = self._run, self._progress.step
        since: list[float] = []

        def trains() -> bool:
            beat = run.heartbeat("chief")
            if not beat or beat.state not in ("training", "saving", "evaluating"):
                return bool(closing and beat and beat.state in ("done", "stopped"))
            if not run.script:
                return closing or self._progress.step >= before + volley.steps
            since.append(time.monotonic())  # a script reports no steps
            return since[-1] - since[0] >= volley.wait_s

        self._await(trains, RECOVERY_S)

    def _await_phase(self, shot: Shot, *, first: bool) -> None:
        """Wait for the phase of a fault, or if it is not the `first` of a volley, until the run has recovered."""
        run, reached = self._run, PHASES[shot.phase]
        if run.script and shot.phase not in SCRIPT_PHASES:
            return  # only the script knows its phase
        before = self._progress

        def due() -> bool:
            beat = run.heartbeat(_who_tells(shot))
            return (beat is not None and reached(beat)) or (not first and self._goes_on(before))

        self._await(due, RECOVERY_S if shot.phase in LAST_PHASES else PHASE_S)

    def _goes_on(self, before: RecordedStep) -> bool:
        """Whether the run has recovered, or had nothing to recover from."""
        now = self._progress
        undisturbed = self._synchronous and now.step > before.step + RECOVERED_STEPS
        return now.generation > before.generation or undisturbed

    def _await(self, condition: Callable[[], bool], timeout_s: float) -> None:
        def due() -> bool:
            self._lasting.undo_due()
            return self._ended or condition()

        wait_until(due, timeout_s, POLL_S)

    def _reaches(self, shot: Shot) -> bool:
        """Whether the fault's target process exists; while a task restarts, there is none for a moment."""
        injector = registry.find_runtime(self._run).injector(self._run)
        try:
            process = injector.processes(shot.task)["program" if shot.kind in ("kill", "slow", "corrupt") else "agent"]
            if isinstance(injector, ContainerFaults):
                found = ("sh", "-c", f"kill -0 {int(process['pid'])}")
                return injector._ask("exec", injector._container(shot.task), *found)[0] == 0
            return processes.alive(process)
        except (ClusterError, OSError):
            return False

    def _shoot(self, shot: Shot) -> dict[str, Any] | None:
        """Inject one fault; return its record, or None if it has no target at present."""
        injector = registry.find_runtime(self._run).injector(self._run)
        phase, step = volleys.phase_of(self._run.heartbeat(_who_tells(shot))), self._progress.step
        try:
            if not self._reaches(shot):
                return None
            if shot.kind == AGENT:
                injector.inject("kill", shot.task, whole=True)
            else:
                injector.inject(shot.kind, shot.task)
        except (ClusterError, OSError):  # its program has not begun, or the checkpoint to damage is being replaced
            injector.undo(shot.task)
            return None
        if shot.lasts_s:
            self._lasting.add(injector, shot)
        if shot.kind in ENDING:
            self._ending = shot.kind
        return {"kind": shot.kind, "task": shot.task, "phase": phase, "step": step}


def _who_tells(shot: Shot) -> str:
    """Return the task whose heartbeat shows the phase: only the chief knows which step is the last."""
    return "chief" if shot.phase in LAST_PHASES else shot.task


class _Lasting:
    """The lasting faults that are active at present."""

    def __init__(self) -> None:
        self._until: list[tuple[float, FaultInjector, str]] = []

    def add(self, injector: FaultInjector, shot: Shot) -> None:
        """Undo a fault once its time is over."""
        self._until.append((time.monotonic() + shot.lasts_s, injector, shot.task))

    def undo_due(self) -> None:
        """Undo the faults whose time is over; to be called often."""
        now = time.monotonic()
        for entry in [entry for entry in self._until if entry[0] <= now]:
            self._until.remove(entry)
            entry[1].undo(entry[2])

    def wait(self, seconds: float) -> None:
        """Wait, and undo the faults whose time ends while waiting."""
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            self.undo_due()
            time.sleep(min(left_s, POLL_S))
        self.undo_due()

    def end(self) -> None:
        """Wait until the time of the last fault is over, and undo it."""
        self.wait(max((until - time.monotonic() for until, _, _ in self._until), default=0.0))
