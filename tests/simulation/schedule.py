"""Schedules: what is drawn from a seed runs in a simulated world; and the invariants of docs/internals/recovery.md.

A `Broken` begins with the invariant's name. Each is checked while a schedule runs or at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from cluster.agent.hub import SILENCE_S
from cluster.agent.schedulers.lifecycle import COPY_S
from cluster.agent.watchdog import FROZEN_S, SILENT_S
from cluster.contract import spec
from cluster.contract.recovery.attempt_limits import LOST_CONTACT, PROGRAM_FAILURE
from cluster.contract.spec import Role
from cluster.system.errors import EXIT_TIMEOUT
from tests.simulation import machine
from tests.simulation.drawn import FOREVER_S, STOPPING, Drawn, draw
from tests.simulation.folder import MAX_RESTARTS, Cache, SimFolder
from tests.simulation.training import Training
from tests.simulation.world import Broken, Now, SimTask, World

SEEN_S = 6.0
"""Four polls of the slowest agent, within which each has noticed what another did."""
STOP_S = 200.0
STOP_TRAINING_S = 8.0
"""How long after a stop request, and after the last fault, the last step may be done."""
STUCK_S = 90.0
"""Longest time from a fault to a new step or the run's end."""
REVIVED_S = 15.0
"""After how long an engine replaces an agent that is stopped."""
NOBODY_LEFT = {"state": "unknown"}
"""The outcome of a run all of whose tasks are gone: the command that watches it ends it."""
FOR_GOOD_S = 110.0
"""A task that would be lost for longer does not come back."""


class Schedule:
    def __init__(self, seed: int, drawn: Drawn | None = None) -> None:
        self.drawn = drawn or draw(seed)
        cluster = spec.build(**self.drawn.topology, separate_chief=not self.drawn.scripted)
        self.world = world = World(cluster, seed)
        self.folder = world.folder = SimFolder(world, cluster, script=self.drawn.scripted)
        self.training = world.training = Training(
            world, steps=self.drawn.steps, save_every=self.drawn.save_every, scripted=self.drawn.scripted
        )
        world.linked = self.drawn.linked
        world.copied = "second copy" in self.drawn.kinds
        world.make_agent = lambda task: machine.make_agent(
            task, scripted=self.drawn.scripted, standby_s=self.drawn.standby_s
        )
        if self.drawn.min_workers is not None:
            self.folder.how |= {"min_workers": self.drawn.min_workers, "grow": self.drawn.grow}
        self.seen_s = SEEN_S + (0.0 if self.drawn.connected else self.drawn.stale_s)
        """Within which every agent has noticed what another did."""
        self.stop_at: float | None = None
        self.first_outcome: Any = None
        self._newest = 0

    def run(self) -> dict[str, Any]:
        """Run it; return the outcome."""
        world, drawn = self.world, self.drawn
        self.folder.__dict__["torn_share"] = drawn.torn_share
        self.training.fails_at = dict(drawn.fails_at)
        for name, task in world.tasks.items():
            task.cache = Cache(world, drawn.stale_s)
            task.skew_s = world.random.choice((-60.0, 0.0, 60.0)) if drawn.skewed else 0.0
            task.crash_at = drawn.crash_at.get(name, set())
            world.at(world.random.uniform(0, 1), task.start)
        for at, kind, name, seconds in drawn.faults:
            if kind == "cut":
                world.at(at, lambda name=name, until=at + seconds: world.cuts.update({name: until}))
            else:
                world.at(at, lambda kind=kind, name=name, seconds=seconds: self._inject(kind, name, seconds))
        with Now.of(world):
            self._watch()
            world.run(self._is_over)
            self._check_end()
        return self.first_outcome or NOBODY_LEFT

    def _is_over(self) -> bool:
        """Whether every agent has ended that can."""
        return all(task.ended or task.gone for task in self.world.tasks.values())

    def _is_alone(self, name: str) -> bool:
        return name == "evaluator" or (name.startswith("worker") and bool(self.drawn.topology.get("ps")))

    def _inject(self, kind: str, name: str, seconds: float) -> None:
        world = self.world
        world.log(name or "-", kind)
        if kind == "stop":
            if self.folder.request_stop("a user"):
                self.stop_at = world.now
            return
        task = world.tasks[name]
        if not task.alive:
            return
        alive = [each for each in task.programs if each.code is None]
        program = next((each for each in reversed(alive) if each.started and not each.standby), None)
        waiting = [each for each in alive if each.standby]
        if kind == "kill standby":
            for each in waiting:
                each.exit(-9)
        if kind == "kill task":
            task.kill(seconds / 7)
        elif kind == "lose task":
            task.kill(None if seconds > FOR_GOOD_S else seconds)
        elif kind == "second copy":
            seconds = self._lose_sight(task, seconds)
        if program and kind == "kill program":
            self._kill(task, program)
        if program and kind == "fail program":
            program.exit(1)
        self._stop(task, kind, seconds, program, waiting)

    def _stop(self, task: SimTask, kind: str, seconds: float, program: Any, waiting: list[Any]) -> None:
        """Freeze the processes of a task that this kind of fault is about."""
        if kind in (*STOPPING, "freeze agent"):
            self._freeze(task, seconds)
            if self.drawn.revived and seconds > REVIVED_S and kind != "second copy":
                self.world.at(REVIVED_S, lambda: self._revive(task))
        if kind in (*STOPPING, "freeze standby"):
            for each in waiting:
                self._freeze(each, seconds)
                self.training.froze(each)
        if program and kind in ("freeze program", *STOPPING):
            self._freeze(program, seconds)
            self.training.froze(program)
            self._check_frozen(task, program, whole=kind != "freeze program")

    def _lose_sight(self, task: SimTask, seconds: float) -> float:
        """Let the engine start another copy of a task whose host stands still; return for how long that does."""
        # A script's other copy comes first: a script that continues after the others lost contact fails its run.
        uniform = self.world.random.uniform
        self.world.at(seconds * uniform(0.2, 0.8 if self.drawn.scripted else 1.0), lambda: self._copy(task))
        return seconds * (1.0 if self.drawn.scripted else uniform(0.5, 1.0))

    def _copy(self, task: SimTask) -> None:
        """Let the engine start a task elsewhere, and check that the first copy ends."""
        if self.world.tasks[task.name] is not task:
            return
        self.world.start_copy(task.name)

        def ended() -> None:
            if (since_s := self.world.now - task.frozen_until) < COPY_S:
                self.world.at(2 * COPY_S - since_s, ended)
            elif task.superseded and (task.alive or any(each.code is None for each in task.programs)):
                raise Broken(f"copies: the older copy of {task.name} continues")

        self.world.at(2 * COPY_S, ended)

    def _revive(self, task: SimTask) -> None:
        """Replace an agent that is still stopped, and with it its programs."""
        if task.alive and task.frozen_until > self.world.now and self.world.tasks[task.name] is task:
            task.kill(0.1)

    def _freeze(self, frozen: Any, seconds: float) -> None:
        """Freeze a task or a program; one that is frozen already does not continue earlier."""
        if frozen.frozen_until <= self.world.now:
            frozen.frozen_since = self.world.now
        frozen.frozen_until = max(frozen.frozen_until, self.world.now + seconds)

    def _kill(self, task: SimTask, program: Any) -> None:
        """Kill a program, and check that its task's agent acts on that."""
        generation, began = program.generation, self.world.now
        trains = program in self.training.session and not self._is_alone(task.name)
        program.exit(-9)

        def seen() -> None:
            over = "outcome" in self.folder.records or "stop" in self.folder.records
            busy = task.frozen_until > began or task.thread is not thread or not task.alive
            if not over and not busy and self.folder.newest_generation == generation:
                raise Broken(f"seen: nothing begins after {task.name} was killed in generation {generation}")

        thread = task.thread
        if trains:
            self.world.at(self.seen_s, seen)

    def _check_frozen(self, task: SimTask, program: Any, *, whole: bool) -> None:
        """Check that somebody ends a program that was frozen while it trained: its agent, or all if that is frozen."""
        generation, thread, until = program.generation, task.thread, program.frozen_until
        patience_s = (SILENT_S if whole else FROZEN_S) + self.seen_s
        if whole and self.drawn.linked:
            patience_s += SILENCE_S  # until then its agent counts as connected
        began = self.world.now
        met = [each for each in self.world.tasks.values() if any(p.generation >= 0 for p in each.programs_in_use)]
        watchers = {other: self._as_watcher(other) for other in met if other is not task}
        settled = program.state in ("training", "evaluating") and not self.drawn.scripted

        def seen() -> None:
            gone = program.code is not None or "outcome" in self.folder.records or "stop" in self.folder.records
            others = task.thread is not thread or (task.frozen_until > until if whole else task.frozen_until > 0)
            watched = any(
                each.alive and each.frozen_until <= began and self._as_watcher(each) == then
                for each, then in watchers.items()
            )
            if not gone and not others and (watched or not whole) and self.folder.newest_generation == generation:
                raise Broken(f"seen: {task.name} is frozen in {generation}, and nobody does anything about it")

        if settled and not (whole and task.name == "evaluator") and patience_s < until - self.world.now:
            self.world.at(patience_s, seen)

    def _as_watcher(self, task: SimTask) -> Any:
        """Return the values that stay the same while an agent watches others; a restart alone begins that again."""
        return task.alive, task.thread, task.programs_in_use if self._is_alone(task.name) else None

    def _watch(self) -> None:
        """Look at what is recorded, all the time."""
        outcome = self.folder.records.get("outcome")
        if isinstance(outcome, dict):
            if self.first_outcome not in (None, outcome):
                raise Broken(f"outcome: {self.first_outcome} became {outcome}")
            if self.first_outcome is None and outcome.get("exit_code") == EXIT_TIMEOUT:
                self._check_missing(outcome)
            self.first_outcome = outcome
        if (newest := self.folder.newest_generation) != self._newest:
            self._newest = newest
            self._once_seen(newest, 0.0, lambda: self._check_seen(newest))
            self._check_formed(newest)
        if self.stop_at is not None and outcome is None and self.world.now > self._last_fault() + STOP_S:
            raise Broken("stop: the run does not stop")
        if (
            outcome is None
            and not self._is_over()
            and self.world.now > self._last_change() + STUCK_S + self.drawn.stale_s
        ):
            raise Broken(f"stuck: no new step and no end since {self._last_change():.1f} s")
        trainers = [task for task in self.world.tasks.values() if not self._is_alone(task.name)]
        told = any(task.frozen_until <= self.world.now for task in trainers)  # otherwise no agent can pass it on
        if self.stop_at is not None and told and self.training.last_step_at > self._last_fault() + STOP_TRAINING_S:
            raise Broken("stop: training continues")
        if not self._is_over():
            self.world.at(0.5, self._watch)

    def _check_missing(self, outcome: dict[str, Any]) -> None:
        """Check that a run which misses tasks does not end while as many as it needs are there, and have been."""
        since = self.world.now - self.seen_s
        needed = 1 + self.drawn.min_workers if self.drawn.min_workers is not None else len(self.world.spec.members)
        left_out = self.folder.records[f"generations/{self.folder.newest_generation}"].get("left_out", ())
        members = [self.world.tasks[member.name] for member in self.world.spec.members if member.name not in left_out]
        there = [each.name for each in members if each.alive and max(each.started_at, each.frozen_until) <= since]
        if len(there) >= needed and "chief" in there:
            raise Broken(f"policy: the cluster was not complete, although {there} were there: {outcome}")
        if named := [name for name in there if name == outcome["task"] or repr(name) in outcome["error"]]:
            raise Broken(f"stuck: {named} are named although they were there: {outcome}")

    def _last_fault(self) -> float:
        ends = [at + seconds % FOREVER_S for at, _, _, seconds in self.drawn.faults]
        return max([self.stop_at or 0.0, *ends]) + self.drawn.stale_s

    def _last_change(self) -> float:
        """Return when a step was done last, a fault began or ended, or a task came back; a pause counts as well."""
        now = self.world.now
        faults = [min(now, at + seconds % FOREVER_S) for at, _, _, seconds in self.drawn.faults if at <= now]
        started = [task.started_at for task in self.world.tasks.values()]
        pause_s = self.folder.records[f"generations/{self.folder.newest_generation}"].get("pause_s", 0.0)
        return max(*faults, *started, self.training.last_step_at, 0.0) + pause_s

    def _once_seen(self, generation: int, more_s: float, check: Callable[[], None]) -> None:
        """Check something once a generation was seen; agents list it if its creator died or the hub was frozen."""
        began, hub = self.world.now, self.world.tasks["chief"]
        teller, thread = self.folder.created_by[f"generations/{generation}"]
        was_frozen = hub.frozen_until > began  # a new agent may have replaced it until the look

        def look() -> None:
            awake = not was_frozen and max(teller.frozen_until, hub.frozen_until) <= began
            told = teller.alive and teller.thread is thread and awake
            self.world.at(more_s + (0.0 if told else self.drawn.stale_s), check)

        self.world.at(self.seen_s, look)

    def _check_seen(self, generation: int) -> None:
        """Check that no agent keeps a program of an earlier generation, of those that had the time to end it."""
        if "outcome" in self.folder.records:
            return  # programs have time to save
        soon = False
        for task in self.world.tasks.values():
            for program in task.programs:
                old = program.code is None and 0 <= program.generation < generation
                since = max(task.started_at, task.frozen_until, program.frozen_until)
                if old and task.alive and since <= self.world.now - self.seen_s:
                    raise Broken(f"seen: {task.name} keeps its program of {program.generation} in {generation}")
                soon = soon or (old and task.alive)
        if soon:
            self.world.at(self.seen_s, lambda: self._check_seen(generation))

    def _check_formed(self, generation: int) -> None:
        """Check that a generation that begins with standby processes gets one from every agent, or is over soon."""
        record = self.folder.records[f"generations/{generation}"]
        if "standby_ports" not in record:
            return
        members = [task for name, task in self.world.tasks.items() if name not in record.get("left_out", ())]
        tasks = [task for task in members if not task.task.role.is_sidecar and task.alive]
        threads = [task.thread for task in tasks]

        def begun() -> None:
            over = self.folder.newest_generation > generation or "outcome" in self.folder.records
            for task, thread in zip(tasks, threads, strict=True):
                has = any(program.generation == generation for program in task.programs)
                watched = task.alive and task.thread is thread and task.frozen_until <= self.world.now - self.seen_s
                if watched and not has and not over:
                    raise Broken(f"seen: {task.name} begins nothing in {generation}, which waits for it")

        self._once_seen(generation, record.get("pause_s", 0.0), begun)

    def _check_end(self) -> None:
        if all(task.gone for task in self.world.tasks.values()):
            return  # the command that watches the run ends it
        outcome, drawn = self.folder.records.get("outcome"), self.drawn
        if not isinstance(outcome, dict) or self.first_outcome not in (None, outcome):
            raise Broken(f"outcome: {self.first_outcome} became {outcome}")
        self.first_outcome = outcome
        if self.folder.records.get("summary") != outcome and not self.world.tasks["chief"].gone:
            raise Broken("end: the chief wrote no summary of the outcome")
        if outcome["state"] == "succeeded" and self.training.result != list(range(1, drawn.steps + 1)):
            raise Broken(f"checkpoint: the result holds the steps {self.training.result}")
        ended = [task for task in self.world.tasks.values() if not task.gone]
        alive = [task.name for task in ended for each in task.programs if each.code is None]
        if alive:
            raise Broken(f"end: programs of {alive} outlive the run")
        self._check_policy(outcome, Counter(drawn.kinds))

    @property
    def _restarts(self) -> int:
        """How often the gang restarted, but for second tries after that with standby processes."""
        return sum(each.get("cause") != "its standby process had ended" for each in self.begun if each["generation"])

    @property
    def begun(self) -> list[dict[str, Any]]:
        records = [value for name, value in self.folder.records.items() if name.startswith("generations/")]
        return [record for record in records if isinstance(record, dict)]

    def _check_policy(self, outcome: dict[str, Any], kinds: Counter[str]) -> None:
        state = outcome["state"]
        cuts = kinds.pop("cut", 0)
        # A cut changes nothing else: a host that neither the hub nor the folder tells of a generation misses it.
        missed = cuts if self.drawn.stale_s else 0
        if state == "stopped" and self.stop_at is None:
            raise Broken("policy: nobody requested the stop")
        for begun in self.begun:
            by_itself, last_step = begun.get("kind") in (PROGRAM_FAILURE, LOST_CONTACT), begun.get("last_step", -1)
            if by_itself and last_step >= 0 and begun.get("single_steps_from") != last_step:
                raise Broken(f"policy: {begun} does not begin with single steps")
        timed_out = outcome.get("exit_code") == EXIT_TIMEOUT  # see `_check_missing`
        if state == "failed" and not kinds["fails for good"] and not timed_out:
            raise Broken(f"policy: the run failed: {outcome}")
        if state == "succeeded" and kinds["fails for good"]:
            raise Broken("policy: the run cannot have succeeded")
        generations = self.folder.newest_generation
        repeated = kinds.keys() == {"fails for good"} and not self.drawn.topology.get("ps") and not self.drawn.scripted
        if repeated and generations != MAX_RESTARTS:
            raise Broken(f"policy: {generations} restarts, expected {MAX_RESTARTS}")
        if kinds.keys() <= {"kill program", "kill task"} and self._restarts > kinds.total() + missed:
            raise Broken(f"policy: {self._restarts} restarts of the gang for {kinds.total()} kills")
        alone = [self._is_alone(name) for _, kind, name, _ in self.drawn.faults if name and kind != "cut"]
        if all(alone) and not kinds.keys() - {"kill program", "kill task"} and generations:
            raise Broken("policy: the gang restarted for tasks that restart alone")
        if outcome.get("task") == Role.EVALUATOR and state == "failed":
            raise Broken("policy: the evaluator failed the run")


def explain(schedule: Schedule, last: int = 60) -> str:
    """Return the schedule's faults and its last events, to be shown with a broken invariant."""
    lines = [f"{at:8.2f}  {task:<10} {what}" for at, task, what in schedule.world.trace[-last:]]
    return "\n".join([f"seed {schedule.world.seed}: {schedule.drawn}", *lines])
