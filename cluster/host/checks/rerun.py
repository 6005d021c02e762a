"""`invoke rerun`: repeats a run from its manifest, and compares both step by step and bit by bit."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.contract.run import membership, owner
from cluster.contract.run.folder import RunFolder
from cluster.host.control import foreground
from cluster.host.launch import planning, startup, teardown
from cluster.host.options.request import Request
from cluster.host.options.run_file import flatten
from cluster.host.runtime.base import Shell
from cluster.host.view import interrupts
from cluster.host.view.columns import plain_lines
from cluster.host.view.live import Live
from cluster.host.view.status import ended_lines
from cluster.system.errors import UsageError
from cluster.system.messages import counted, short_path

COMPARED = ("code", "locks", "image", "config", "own_code", "cluster", "data", "environment")
"""The parts of a manifest in which two runs may differ."""
CODE_HASHES = tuple(f"code.{part}_sha256" for part in startup.CODE)
"""If two runs agree in these, their commits differ only in documentation or tests."""


@dataclass(frozen=True)
class RunComparison:
    """The comparison of two runs."""

    verdict: str
    """`identical` or `different`."""
    steps_compared: int
    max_relative: float
    """The largest relative difference between the losses of a step."""
    from_step: int | None
    """The first step whose losses differ."""
    same_weights: bool
    differences: list[str]


@interrupts.handled()  # SIGTERM ends the new run, too, and after SIGHUP it is still watched to its end
def repeat_run(
    run: RunFolder, runtime: str, sh: Shell, *, trust: bool = False, shown: bool = True
) -> tuple[RunFolder, RunComparison | None]:
    """Repeat a run, by default on its own runtime; return the new run and, if it succeeded, the comparison."""
    if run.script:
        raise UsageError(f"run {run.name!r} is a script's, which reports no losses to compare; repeat it with `up`")
    if (state := getattr(run.load_summary(), "state", "in progress")) != "succeeded":
        raise UsageError(f"run {run.name!r} is {state}: expected one that succeeded; finish it with --resume first")
    runtime = runtime or str(run.load_manifest().get("runtime", "auto"))
    request = Request(again=run.name, runtime=runtime, tensorboard_port="0", trust=trust)
    began = time.time()
    planned = startup.start_planned(planning.plan(request), sh, began=began)
    try:
        with Live() if shown else contextlib.nullcontext() as live:
            ended = foreground.follow(planned.run, live.show if live else lambda value: None)
    except BaseException:
        foreground.kill(planned.run, sh)
        raise
    if left := teardown.remove_ended(planned.run, sh):
        print(left, file=sys.stderr)
    return planned.run, compare_repeated(run, planned.run) if ended.state == "succeeded" else None


def compare_repeated(first: RunFolder, second: RunFolder) -> RunComparison:
    """Compare two successful runs."""
    losses, others = first.losses(), second.losses()
    common = sorted(losses.keys() & others.keys())
    apart = {step: abs(losses[step] - others[step]) / max(abs(losses[step]), 1e-30) for step in common}
    from_step = next((step for step, difference in apart.items() if difference > 0), None)
    same = len({getattr(run.load_summary(), "weights_sha256", None) for run in (first, second)}) == 1
    kind = "identical" if same and from_step is None and losses.keys() == others.keys() else "different"
    differences = [*_differences(first, second)] if kind == "different" else []
    return RunComparison(kind, len(apart), max(apart.values(), default=0.0), from_step, same, differences)


@plain_lines
def rerun_lines(second: RunFolder, compared: RunComparison | None) -> list[str]:
    """Format the result of a repeated run as lines of text."""
    if compared is None:
        return ended_lines(second)
    steps, folder = counted(compared.steps_compared, "logged step"), f"run folder   {short_path(second.path)}"
    if compared.verdict == "identical":
        return [f"identical: the losses of {steps} and the final weights are the same bits", folder]
    far = "the losses are the same"
    if compared.from_step is not None:
        far = f"the losses differ by up to {compared.max_relative:.1e} (relative), from step {compared.from_step} on"
    weights = "the final weights are the same bits" if compared.same_weights else "the final weights differ"
    differences = [f"differs: {difference}" for difference in compared.differences]
    return [f"{compared.verdict}: {far} over {steps}; {weights}", *differences, folder]


def _differences(first: RunFolder, second: RunFolder) -> Iterator[str]:
    for run in (first, second):
        for change in membership.changes(run):
            yield f"tasks: {run.name} continued {change}"
    ones, others = (dict(flatten(run.load_manifest())) for run in (first, second))
    same_code = all(ones.get(key, "") == others.get(key) for key in CODE_HASHES)
    # Local tasks get free ports, and each run has a separate token.
    expected = ("cluster.tasks", f"environment.variables.{owner.TOKEN}", *(["code"] if same_code else []))
    for key in sorted(ones.keys() | others.keys()):
        if key.startswith(COMPARED) and not key.startswith(expected) and ones.get(key) != others.get(key):
            yield f"{key}: {ones.get(key)} there, {others.get(key)} here"
