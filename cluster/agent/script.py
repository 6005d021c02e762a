"""The agent of a task that runs a user's script, which knows nothing of gates, heartbeats or our exit codes.

So the script starts once its cluster is complete, its agent writes the heartbeat until the end, and its end means:

    exit code 0               its work is done; the run succeeds once every script that trains has ended so
    any other exit code       its own error, which another attempt would repeat: the run fails and names it
    a signal                  it was killed or crashed: it starts again, as the failure policy says
    an error due to others    when a task is killed, the scripts of the others end with an error; so each waits for the
                              task that really died to report it, and then starts again with it
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

from cluster.agent import tmpdir
from cluster.agent.agent import Agent
from cluster.agent.decisions import PEER_LOST_PATIENCE_S
from cluster.agent.program import Program, Script
from cluster.agent.watchdog import Watchdog
from cluster.contract import settings
from cluster.contract.recovery import ends
from cluster.contract.recovery.attempts import LOST_CONTACT
from cluster.contract.recovery.ends import End
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.contract.run.records import TaskState
from cluster.contract.spec import Role
from cluster.system.errors import EXIT_FAILED
from cluster.system.paths import ROOT
from cluster.system.processes import as_exit_code

LONE_RESTART_S = 60.0
"""How long after a worker's restart another script's error counts as its consequence."""
OTHERS_POLL_S = 0.2
KERAS_HOOK = ROOT / "train" / "patches" / "hook"
"""Holds the `sitecustomize` that patches Keras 3 in a script's process."""


class ScriptAgent(Agent):
    """Runs one task's script from its start to the run's outcome."""

    grace_s = settings.seconds("SCRIPT_GRACE_S")
    """Seconds that a script gets to end by itself after SIGTERM, as many as `docker stop` gives. TensorFlow handles
    SIGTERM as a notice of preemption, so a script that trains on several tasks only sees it if it asks TensorFlow."""
    grace_ends = 0.0
    """When to kill a script that was asked to end."""
    _script_began_s = 0.0

    def _program(self, environment: dict[str, str]) -> Program:
        folder = self.run.work(self.task.name)
        environment = tmpdir.add(script_environment(environment), self.run, self.task)
        return Script(self.command, environment, self.run.log(self.task.name), folder)

    def _let_start(self, program: Program, heartbeat: HeartbeatWriter, variables: dict[str, str]) -> None:
        program.open_gate(variables)
        self.heartbeat = heartbeat
        self._script_began_s = time.monotonic()
        heartbeat.update(state="training")
        self.run.event(self.task.name, "script started")

    def _request_end(self, program: Program) -> None:
        super()._request_end(program)
        self.grace_ends = self.grace_ends or time.monotonic() + self.grace_s
        if time.monotonic() > self.grace_ends:
            self.run.end("stopped", task=self.task.name)

    def _grace_s(self) -> float:
        left_s = max(0.0, self.grace_ends - time.monotonic()) if self.grace_ends else self.grace_s
        return min(left_s, super()._grace_s())

    @property
    def _on_two_networks(self) -> bool:
        return True

    def _act_on_exit(self, program: Program, generation: int) -> None:
        code = program.wait()
        if self.run.outcome:
            return
        others_had_failed = self._others_failed(generation)
        end = self._end_of(program, code, generation)
        # TensorFlow aborts when it learns that another task failed.
        killed = code < 0 and not (code == -signal.SIGABRT and others_had_failed)
        if killed and not self.restarts_alone:
            ends.record(self.run, generation, end)  # first: a host that is lost now would leave no record
        self.heartbeat.update(state="done" if code == 0 else "failed", exit_code=as_exit_code(code))
        if self.run.stop_requested:
            self.run.end("stopped", task=self.task.name)
        elif code == 0:
            self._await_outcome(generation)
        elif killed and self.restarts_alone:
            self._restart_alone(end)
        elif killed:
            self._restart_gang(generation, end)
        elif not self._another_restarts_gang(generation, PEER_LOST_PATIENCE_S * (2 if others_had_failed else 1)):
            self._act_on_error(generation, end)

    def _act_on_error(self, generation: int, end: End) -> None:
        """Apply the failure policy to a script's error, for which no other task has begun a generation so far."""
        if self.run.stop_requested:
            self.run.end("stopped", task=self.task.name)
        elif self.run.begun(generation + 1):  # by its name: a network file system may not list it yet
            return
        elif self._another_died(generation):
            self.recovery.restart_gang(generation, dataclasses.replace(end, kind=LOST_CONTACT))
        elif self._worker_restarted(generation):
            cause = f"{end.cause}, after a worker had died"
            self.recovery.restart_gang(generation, dataclasses.replace(end, kind=LOST_CONTACT, cause=cause))
        else:
            self.run.end("failed", task=self.task.name, exit_code=EXIT_FAILED, error=_reported(end))

    @property
    def _runtime_s(self) -> float:
        return time.monotonic() - self._script_began_s

    def _await_outcome(self, generation: int) -> None:
        """Wait until every script that trains has ended with 0; the chief's agent records it."""
        if self.task.role != Role.CHIEF and not self._must_act_for_chief(generation):
            return
        watchdog = Watchdog(self.run, self.spec, self.task, generation)
        training = {task.name for task in self.spec.tasks if not self.spec.serves(task)}
        while not self._is_over(generation):
            beats = self.run.heartbeats().values()
            done = {beat.task for beat in beats if (beat.state, beat.generation) == ("done", generation)}
            if training <= done:
                self.run.end("stopped" if self.run.stop_requested else "succeeded", task=self.task.name)
            elif finding := watchdog.examine():
                self._act_on_silence(finding, generation)
            else:
                time.sleep(OTHERS_POLL_S)

    def _others_failed(self, generation: int) -> bool:
        failed = [
            beat.task
            for beat in self.run.heartbeats().values()
            if (beat.state, beat.generation) == (TaskState.FAILED, generation)
        ]
        return bool(set(failed) - {self.task.name})

    def _another_died(self, generation: int) -> bool:
        """Whether a task reported that it was killed or crashed, and has not begun the next generation yet."""
        others = [end for end in ends.recorded(self.run, generation) if end.task != self.task.name]
        return any(not end.may_follow for end in others)

    def _worker_restarted(self, generation: int) -> bool:
        """Whether a worker was restarted alone shortly before: not every script continues without one.

        A worker's agent writes both the event and its heartbeat, so no clocks of two machines are compared.
        """
        beats = self.run.heartbeats()
        restarted = [e for e in self.run.events() if (e.event, e.generation) == ("restarted", generation)]
        return any(beats[e.task].updated_at - e.time < LONE_RESTART_S for e in restarted if e.task in beats)


def _reported(end: End) -> str:
    """Return how a script ended, its exit code first, since only the script's author knows what that means."""
    return end.reported if not end.error or end.error.startswith(end.cause) else f"{end.cause}: {end.error}"


def script_environment(environment: dict[str, str]) -> dict[str, str]:
    """Return a script's environment: modules of this checkout must not shadow those that it imports.

    The folder of the hook that patches Keras has no other module.
    """
    entries = environment.get("PYTHONPATH", "").split(os.pathsep)
    kept = [entry for entry in entries if entry and Path(entry).resolve() != ROOT]
    return environment | {"PYTHONPATH": os.pathsep.join([str(KERAS_HOOK), *kept])}
