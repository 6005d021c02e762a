"""A task's program in a simulated run; the agent sees it as `cluster.agent.task_process.TaskProcess`."""

import signal
import subprocess
from collections.abc import Mapping

from cluster.contract.recovery import standby_cluster
from cluster.contract.run.records import Heartbeat, TaskState
from tests.simulation import standby
from tests.simulation.folder import Beat
from tests.simulation.standby import StandbyCluster
from tests.simulation.world import Broken, SimTask, World


class SimProgram:
    """One attempt of a task's program."""

    def __init__(self, world: World, owner: SimTask, environment: Mapping[str, str]) -> None:
        world.operation("start the program")
        self.world, self.owner, self.training = world, owner, world.training
        self.agent_thread = owner.thread
        self.code: int | None = None
        self.generation = -1
        self.frozen_since = self.frozen_until = 0.0
        self.state = "importing"
        self.imported_at = world.now + world.random.uniform(0.3, 3)
        self.serves = False
        """Whether its TensorFlow server listens."""
        self.pid = len(world.pids) + 1
        world.pids.append(self)
        self._stop_requested = False
        self.standby = "STANDBY_PROCESS" in environment
        """Whether it waits to be used."""
        self.port = standby.port(environment, world.spec, owner.task)
        self.cluster: StandbyCluster | None = None
        """The cluster that it has formed with other standby processes, or is about to."""
        same = [program for program in owner.programs if program.code is None and program.standby == self.standby]
        if same:
            raise Broken(f"programs: {owner.name} has {len(same) + 1} programs at once")
        owner.programs.append(self)
        self.cluster_number = int(environment.get(standby_cluster.NUMBER, "0"))
        if standby_cluster.VARIABLE in environment:
            self.cluster = self.training.standby_cluster(int(environment["GENERATION"]))
            world.at(self.imported_at - world.now, self._join)

    @property
    def ended(self) -> bool:
        return self.code is not None

    @property
    def started(self) -> bool:
        """Whether there is a process: a script starts only once its cluster is complete."""
        return self.code is None and (self.generation >= 0 or not self.training.scripted)

    @property
    def is_stopped(self) -> bool:
        return self.code is None and not self.runs

    @property
    def stopped_s(self) -> float:
        return self.world.now - self.frozen_since if self.is_stopped else 0.0

    @property
    def runs(self) -> bool:
        return self.code is None and self.frozen_until <= self.world.now

    def open_gate(self, variables: dict[str, str]) -> None:
        self.world.operation("open the gate")
        self.generation, self.standby = int(variables["GENERATION"]), False
        if self.cluster is None:
            self.training.passed_gate(self)
            if variables.get("TF_CONFIG") == "":
                self.port = 0  # a chief that continues alone
        self.world.at(max(0.0, self.imported_at - self.world.now), self._join)

    def _join(self) -> None:
        if self.code is None:
            self.world.at(max(0.0, self.frozen_until - self.world.now), self._join_now)

    def _join_now(self) -> None:
        if self.code is not None:
            return
        servers = [each for each in self.owner.programs if each.code is None and each is not self and each.serves]
        if self.port and self.port in (each.port for each in servers):
            raise Broken(f"ports: two programs of {self.owner.name} listen on {self.port}")
        self.serves = self.cluster is not None or self.generation >= 0
        if self.standby and self.cluster:
            self.cluster.join(self)
        elif not self.standby:
            self.training.join(self)

    def beat(self, state: str, step: int) -> None:
        self.state = state
        if self.world.training.scripted or self.owner.superseded:
            return  # its agent writes it, or the newer copy's program does again within a second
        values = Heartbeat(
            task=self.owner.name,
            role=self.owner.task.role.value,
            state=TaskState(state),
            generation=self.generation,
            step=step,
            updated_at=0.0,
        )
        beat = self.world.folder.beats.get(self.owner.name)
        if beat is None or beat.writes != self._writes:
            beat = self.world.folder.beats[self.owner.name] = Beat(values, self.owner.skew_s, self._writes)
            self.owner.cache.forget(f"beats/{self.owner.name}")
        beat.values = values

    def _writes(self) -> bool:
        return self.runs

    def wait(self, timeout_s: float | None = None, bell: object = None) -> int:
        self.world.operation("wait for the program")
        if self.code is None:
            seconds = timeout_s if timeout_s is not None else 1.0
            self.world.sleep(self.world.random.uniform(0, seconds) if bell else seconds)
        if self.code is None:
            raise subprocess.TimeoutExpired("program", timeout_s or 0)
        return self.code

    def request_end(self) -> None:
        self.world.operation("SIGTERM")
        if not self._stop_requested and self.code is None:
            self._stop_requested = True
            self.training.stop(self)

    def show_stacks(self) -> None:
        """Print nothing."""

    def end(self, grace_s: float) -> int:
        self.world.operation("end the program")
        if self.code is None and grace_s > 0:
            self.request_end()
            deadline = self.world.now + grace_s
            while self.code is None and self.world.now < deadline:
                self.owner.wait(min(grace_s, 1.0))
        self.exit(-signal.SIGKILL)
        assert self.code is not None
        return self.code

    def error(self, code: int) -> str | None:
        return "own error" if code > 0 else None

    def exit(self, code: int) -> None:
        if self.code is None:
            self.code = code
            beat = self.world.folder.beats.get(self.owner.name)
            if beat and beat.writes == self._writes:
                beat.settle_at_death()
            self.world.log(self.owner.name, f"program of {self.generation} ended with {code}")
            self.training.left(self)
            if self.owner.alive and self.owner.thread is self.agent_thread:
                self.owner.wake()
