"""Inject one fault after the other until the run ends: `invoke chaos storm`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence

from cluster.contract.results import reference
from cluster.contract.run import membership
from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import Role
from cluster.host.control import chaos, watch
from cluster.host.control.faults import KINDS
from cluster.host.runtime import registry
from cluster.host.view.ended import ended_lines
from cluster.host.view.live import Live
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, UsageError
from cluster.system.messages import counted, short_path
from cluster.system.terminal import print_lines

STEPS_BETWEEN = (5, 40)
"""Fewest and most new steps between two faults."""


def main(
    run: RunFolder, count: int, seed: int, kinds: Sequence[str], timeout_s: float, limit_s: float = float("inf")
) -> int:
    """Inject the faults, wait for the end of the run, report the result; return the exit code.

    `timeout_s` bounds the wait for the step of each fault, and for the recovery from it; `limit_s` all of them.

    Raises:
        UsageError: this run cannot have such a storm.
    """
    check(run, kinds)
    results = deal(run, count, seed, kinds, print_lines, timeout_s, limit_s)
    print_lines(f"{counted(len(results), 'fault')} inflicted; waiting for the run's end")
    with Live() as live:
        ended = watch.follow(run, live.show)
    print("\n".join(ended_lines(run, short_path(run.path))))
    if ended.state != "succeeded":
        cause = ended.failure
        why = f": {cause.task or 'the run'}: {cause.error}" if cause else ""
        print_lines(f"the run {ended.state} after {len(results)} of {counted(count, 'fault')}{why}")
    elif len(results) < count:
        print_lines(
            f"the run had no room for {count} faults: train for longer (-- --max-steps), or request fewer (--faults)"
        )
    well = ended.state == "succeeded" and len(results) == count and reference.same_bits(run) is not False
    return EXIT_DONE if well else EXIT_FAILED


def deal(
    run: RunFolder,
    count: int,
    seed: int,
    kinds: Sequence[str],
    log: Callable[[str], None],
    timeout_s: float = chaos.RECOVERY_TIMEOUT_S,
    limit_s: float = float("inf"),
) -> list[chaos.Result]:
    """Inject faults, some steps apart, until there were enough or the run has no room for more.

    Args:
        run: in progress, and long enough.
        count: the number of faults.
        seed: determines the faults; when they are injected depends on the run.
        kinds: to draw from; empty: all that fit the run.
        log: called with a line for each.
        timeout_s: the longest wait for the step of a fault, and for the recovery from it.
        limit_s: after which no more faults are injected.
    """
    deadline = time.monotonic() + limit_s
    draw = random.Random(seed)  # noqa: S311  # chaos needs to be repeated, not to be secret
    results: list[chaos.Result] = []
    for number in range(1, count + 1):
        fault = _drawn(run, draw, kinds)
        if run.load_summary() or run.newest_step + STEPS_BETWEEN[1] >= _last_step(run):
            break  # there is no room for another one
        if time.monotonic() > deadline:
            log(f"{limit_s / 60:g} minutes are over")
            break
        log(f"fault {number}/{count}: {fault} at step {fault.at_step}")
        try:
            results.append(chaos.inflict(run, fault, timeout_s))
        except UsageError:
            break  # it ended meanwhile
        log(f"  {results[-1].description}")
        if results[-1].ended:
            break
    return results


def check(run: RunFolder, kinds: Sequence[str]) -> None:
    """Check that a storm is possible.

    Raises:
        UsageError: it cannot.
    """
    for kind in kinds or ("kill",):
        if kind in KINDS and KINDS[kind].ends_run:
            raise UsageError(f"--kinds {kind}: it ends the run, and the storm with it; inflict it by itself")
        chaos.check(run, chaos.Fault(kind, "chief"))
    if run.script:
        raise UsageError(
            "storm with a script: a script reports no steps between which to inject faults; kill its tasks one by one"
        )


def _drawn(run: RunFolder, draw: random.Random, kinds: Sequence[str]) -> chaos.Fault:
    spec = membership.cluster(run)
    tasks = [task.name for task in spec.tasks if not task.role.is_sidecar]
    if kinds:
        kind, whole = draw.choice(kinds), False
    else:
        outlived = registry.of(run).faults(run).storm
        elastic = run.started.min_workers is not None and bool(spec.of(Role.WORKER))
        kind, whole = draw.choice(_choices(outlived, synchronous=spec.kind.synchronous, elastic=elastic))
    if KINDS[kind].elastic:  # the chief is never left out
        tasks = [task.name for task in spec.of(Role.WORKER)] or tasks
    return chaos.Fault(kind, draw.choice(tasks), run.newest_step + draw.randint(*STEPS_BETWEEN), whole)


def _choices(outlived: Collection[str], *, synchronous: bool, elastic: bool = False) -> list[tuple[str, bool]]:
    """Return what is drawn from, each kind of fault as often as it weighs, and whether it is one of the whole task."""
    found: list[tuple[str, bool]] = []
    for kind in KINDS.values():
        fits = (synchronous or not kind.synchronous) and (elastic or not kind.elastic)
        if kind.name in outlived and fits:
            found += [(kind.name, False)] * kind.draws + [(kind.name, True)] * kind.whole_draws
    return found


def _last_step(run: RunFolder) -> float:
    """Return the step that the run ends with; without end where no task has reported it yet."""
    beat = run.heartbeat("chief")
    return float((beat and beat.steps_total) or "inf")
