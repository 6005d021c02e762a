"""Programs that train in a simulated run: how they join, step, save, stop and fail, as measured of TensorFlow's.

A gang's step needs all of its members. When one dies, the others hang until they lose contact, which takes 1 to 11 s.
Parameter servers and their workers never end by themselves; a worker may come back. Training is a chain of steps, each
on the state that the previous one left, so that a lost step or one done twice shows in the result.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from cluster.contract.recovery.step_record import RecordedStep
from cluster.contract.spec import Role
from cluster.system.errors import EXIT_PEER_LOST
from tests.simulation.program import SimProgram
from tests.simulation.standby import StandbyCluster
from tests.simulation.world import Broken, SimTask, World


class Training:
    def __init__(self, world: World, *, steps: int, save_every: int, scripted: bool = False) -> None:
        self.world, self.steps, self.save_every, self.scripted = world, steps, save_every, scripted
        spec = world.spec
        self.members = [task.name for task in spec.members] or ["chief"]
        self.served = bool(spec.of(Role.PS))
        self.joined: dict[str, SimProgram] = {}
        self.session: list[SimProgram] = []
        """Who trains together right now."""
        self.step = 0
        self.chain: list[int] = []
        """The steps whose updates the state holds."""
        self.saved: dict[int, list[int]] = {0: []}
        self.fails_at: dict[int, tuple[str, int, int]] = {}
        """At which step which task's program ends by itself, with which code, and how often."""
        self.result: list[int] | None = None
        self.last_step_at = 0.0
        self._stopping = False
        self._standby_clusters: dict[int, StandbyCluster] = {}
        self.saves_whole = True
        """Whether a checkpoint counts only once it is complete."""

    def standby_cluster(self, generation: int) -> StandbyCluster:
        found = StandbyCluster(self, generation, self._members_of(generation))
        return self._standby_clusters.setdefault(generation, found)

    def passed_gate(self, program: SimProgram) -> None:
        """Check that no program of an earlier generation lives that could join the same cluster."""
        if program.owner.name not in self.members:
            return
        for name in self._members_of(program.generation):
            for other in self.world.tasks[name].programs:
                if other.code is None and 0 <= other.generation < program.generation:
                    raise Broken(
                        f"generations: {program.owner.name} begins generation {program.generation} "
                        f"while {name}'s program of {other.generation} is alive"
                    )

    def join(self, program: SimProgram) -> None:
        if program.code is not None or program.owner.superseded:
            return
        if program.owner.name not in self.members:
            program.beat("evaluating", self.step)
            return
        self.joined[program.owner.name] = program
        program.beat("compiling", 0)
        if self.served and self.world.spec.serves(program.owner.task):
            program.beat("training", 0)
        if all(each.owner.superseded for each in self.session):
            self.session = []  # newer copies form their own
        if self.session:
            if self.served:
                self.session.append(program)
            return
        formed, members = program.cluster, self._members_of(program.generation)
        joined = {name: each for name, each in self.joined.items() if name in members}
        if any(each.cluster is not formed or (formed and each.standby) for each in joined.values()):
            return  # it waits for those who have formed this cluster, too
        if set(joined) == members:
            if formed:
                formed.trains = True
            self.session = list(joined.values())
            self._stopping = any(each._stop_requested for each in self._leaders(self.session))
            session, least_s = self.session, 0.05 if formed else 0.5
            self.world.at(self.world.random.uniform(least_s, 2), lambda: self._begin(session))

    def _members_of(self, generation: int) -> set[str]:
        record = self.world.folder.records[f"generations/{generation}"]
        return set(self.members) - set(record.get("left_out", ()))

    def _leaders(self, session: list[SimProgram]) -> list[SimProgram]:
        """Return those whose programs end by themselves."""
        return [each for each in session if not self.world.spec.serves(each.owner.task)]

    def _begin(self, session: list[SimProgram]) -> None:
        if not self._together(session):
            return
        for each in session:  # those of standby processes may have passed their gates before
            self.passed_gate(each)
        saved = max(self.saved)
        newest = max(self.world.folder.checkpoints_saved, default=0)
        if newest != saved:
            raise Broken(f"checkpoint: the newest is of step {newest}, but step {saved} had been saved")
        self.step, self.chain = saved, list(self.saved[saved])
        leader = self._leaders(session)[0]
        self.world.folder.event("chief", "restored", step=saved, generation=leader.generation)
        self._step(session)

    def _together(self, session: list[SimProgram]) -> bool:
        """Whether a step can be done; a frozen member delays it until it continues."""
        if session is not self.session:
            return False
        needed = self._leaders(session) if self.served else session
        if any(each.code is not None for each in needed):
            return False
        generations = {each.generation for each in session if each.code is None}
        if len(generations) > 1:
            raise Broken(f"generations: programs of {sorted(generations)} train together")
        return True

    def _step(self, session: list[SimProgram]) -> None:
        """Do a step once all tasks that it needs are there."""
        if not self._together(session):
            return
        # The chief of parameter servers waits for a frozen worker only at the end.
        continues = self.served and self.step < self.steps
        needed = [each for each in session if not (continues and each.owner.task.role == Role.WORKER)]
        if self._waits_for(needed, lambda: self._step(session)):
            return
        if self._stopping:
            self._after(0.2, 2, lambda: self._save(session, "stopped"))
            return
        for each in self._leaders(session):
            each.beat("training", self.step)
        if self.step >= self.steps:
            self._after(0.2, 2, lambda: self._save(session, "done"))
            return
        self._fail()
        if self._together(session):
            self._update(session)

    def _waits_for(self, needed: list[SimProgram], again: Callable[[], None]) -> bool:
        """Whether one of these is frozen; then continue later."""
        late_s = max((each.frozen_until for each in needed if each.code is None), default=0.0) - self.world.now
        if late_s > 0:
            self.world.at(min(late_s, 0.5) + 0.1, again)
        return late_s > 0

    def _fail(self) -> None:
        """Let the program end by itself that is to do so at the next step."""
        name, code, times = self.fails_at.get(self.step + 1, ("", 0, 0))
        if times:
            self.fails_at[self.step + 1] = (name, code, times - 1)
            if program := self.joined.get(name):
                program.exit(code)

    def _update(self, session: list[SimProgram]) -> None:
        self.step += 1
        self.chain.append(self.step)
        self.last_step_at = self.world.now
        for each in session:
            if each.code is None and each.owner.task.role != Role.PS:
                self.world.folder.steps[each.owner.name] = RecordedStep(session[0].generation, self.step)
        for each in self._leaders(session):
            each.beat("training", self.step)
        if self.step % self.save_every:
            self._after(0.2, 1.2, lambda: self._step(session))
            return
        if not self.saves_whole:
            self._add_checkpoint()
        self._after(0.1, 1.5, lambda: self._save(session, "training"))

    def _after(self, least_s: float, most_s: float, action: Callable[[], None]) -> None:
        self.world.at(self.world.random.uniform(least_s, most_s), action)

    def _save(self, session: list[SimProgram], then: str) -> None:
        """Finish a save: until here a crash leaves nothing of it."""
        if not self._together(session):
            return
        if self._waits_for(self._leaders(session), lambda: self._save(session, then)):
            return
        if not self.scripted:
            self.saved[self.step] = list(self.chain)
            self._add_checkpoint()
        if then == "training":
            self.world.at(0.05, lambda: self._step(session))
            return
        if then == "done":
            self.result = list(self.chain)
        self.session = []
        for each in self._leaders(session):
            each.beat(then, self.step)
            self.world.at(self.world.random.uniform(0, 0.5), lambda each=each: each.exit(0))

    def _add_checkpoint(self) -> None:
        if self.step and self.step not in self.world.folder.checkpoints_saved:
            self.world.folder.checkpoints_saved.append(self.step)
            self.world.tasks["chief"].cache.forget("checkpoints")

    def stop(self, program: SimProgram) -> None:
        """Handle SIGTERM to a program: the gang saves at its next step; an evaluator ends."""
        if program.owner.name not in self.members:
            program.beat("stopped", self.step)
            self.world.at(self.world.random.uniform(0.1, 1), lambda: program.exit(0))
        elif program in self.session and program in self._leaders(self.session):
            self._stopping = True
        elif self.scripted or self.world.spec.serves(program.owner.task):
            program.exit(-signal.SIGTERM)

    def left(self, program: SimProgram) -> None:
        """Let the others lose contact with a program that ended."""
        if self.joined.get(program.owner.name) is program:
            del self.joined[program.owner.name]
        if program.cluster:
            program.cluster.left(program)
        if program not in self.session:
            # Who waits for the cluster to form never finds out.
            return
        if self.served:
            self.session.remove(program)
            if program.owner.task.role == Role.WORKER:
                return
        others = [each for each in self._leaders(self.session) if each is not program]
        if not self.served or program.owner.task.role in (Role.PS, Role.CHIEF):
            self.session = []
        for each in others:
            self.world.at(self.world.random.uniform(1, 11), lambda each=each: self.lose_contact(each))

    def superseded(self, owner: SimTask) -> None:
        """Forget the programs of an older copy: others reach those of the newer one."""
        self.joined = {name: program for name, program in self.joined.items() if program.owner is not owner}

    def froze(self, program: SimProgram) -> None:
        """Let the others lose contact with a frozen program, unless it continues in time."""
        patience_s = self.world.random.uniform(7, 12)
        if program.cluster:
            program.cluster.froze(program, patience_s)
        if len(self.session) > 1 and program in self.session and program.frozen_until - self.world.now > patience_s:
            self.world.at(patience_s, lambda: self._miss(program))

    def _miss(self, program: SimProgram) -> None:
        if program.code is None and program in self.session and not self.served:
            others = [each for each in self.session if each is not program]
            self.session = []
            for each in [*others, program]:
                self.world.at(self.world.random.uniform(0, 1), lambda each=each: self.lose_contact(each))

    def lose_contact(self, program: SimProgram) -> None:
        """End a program that lost contact with its cluster."""
        if program.frozen_until > self.world.now:
            self.world.at(program.frozen_until - self.world.now, lambda: self.lose_contact(program))
        elif self.scripted:
            program.exit(1)
        else:
            program.exit(-signal.SIGABRT if self.world.random.random() < 0.1 else EXIT_PEER_LOST)
