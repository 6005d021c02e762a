"""Time from SIGKILL of a task to the next new step, with and without ready standby processes, and in containers."""

from __future__ import annotations

from functools import partial

from benchmarks.figures import Figure, ratios
from benchmarks.runs import ENDLESS, LIMIT_S, Bench
from cluster.contract.recovery import standby_cluster
from cluster.host.control import chaos
from cluster.host.launch import teardown
from cluster.system.errors import RunFailed
from cluster.system.waiting import wait_until

VICTIMS = ("worker-1", "chief", "worker-0")
CALM_STEPS = 100
"""Steps of every generation before its kill, so that it has a checkpoint and is past the steps that compile."""
READY, WITHOUT = "with standby processes", "without"
STANDBY = {READY: "1", WITHOUT: "0"}
ROUNDS = 3
"""This benchmark uses one in this many rounds, because a round kills every victim."""


def measure(bench: Bench) -> list[Figure]:
    """Kill each victim in turn, in a run with standby processes and in a run without."""
    victims = VICTIMS[:1] if bench.quick else VICTIMS
    processes: dict[str, list[float]] = {how: [] for how in STANDBY}
    containers: dict[str, list[float]] = {how: [] for how in STANDBY}
    for number in bench.turns():
        if number % ROUNDS:
            continue
        for how in STANDBY:
            processes[how] += _recoveries(bench, number, how, victims)
            if bench.engine and not containers[how]:  # these start slowly: one round
                containers[how] += _recoveries(bench, number, how, victims, "docker")
    title = "SIGKILL of a task to the next new step, chief and 2 workers, with standby processes"
    found = [Figure("recovery", title, "s", processes, ratios(processes[READY], processes[WITHOUT]))]
    if bench.engine:
        compared = ratios(containers[READY], containers[WITHOUT])
        found.append(Figure("recovery-containers", f"{title}, containers", "s", containers, compared))
    return found


def _recoveries(bench: Bench, number: int, how: str, victims: tuple[str, ...], runtime: str = "local") -> list[float]:
    """Return the seconds of a recovery from the death of each victim, one after the other in one run."""
    name, standby = f"recovery-{runtime}-{STANDBY[how]}-{number}", STANDBY[how]
    words = ("--workers=2", f"--checkpoint-every={CALM_STEPS // 2}", "--detach")
    run = bench.up(name, *words, steps=ENDLESS, runtime=runtime, STANDBY=standby)
    found = []
    for victim in victims:
        bench.await_step(run, run.newest_step + CALM_STEPS)
        ready = partial(standby_cluster.is_complete, run, run.load_cluster(), run.generation)
        if how == READY and not wait_until(ready, LIMIT_S):
            raise RunFailed(f"the standby processes of {name} do not become ready")
        result = chaos.inject(run, chaos.Fault("kill", victim))
        if result.resumed_s is None:
            raise RunFailed(f"{name} did not recover from the death of {victim}: {result.description}")
        found.append(result.resumed_s)
    teardown.remove_run(run, lambda command: bench.call(["bash", "-c", command]), grace_s=0)
    return found
