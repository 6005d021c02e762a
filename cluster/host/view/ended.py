"""How a run ended, as lines of text."""

import time

from cluster.contract.results import goodput, reference, stragglers
from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.summary_records import Cause, Summary
from cluster.host.runtime import mirror, tensorboard
from cluster.host.view.columns import plain_lines
from cluster.system.messages import COMMAND, counted, short_path
from cluster.system.processes import describe_exit
from cluster.system.terminal import terminal_width

SHOWN_CHANGES = 5


@plain_lines
def ended_lines(run: RunFolder) -> list[str]:
    """Return the last lines of a run that has a summary: how it ended, where it is, what to do next."""
    summary = records.read_record(run.summary, Summary.from_json)
    port, shown_path = tensorboard.running_port(run.path.parent), short_path(run.path)
    lines = []
    if summary.state == "failed":
        lines += _failure(run, summary)
    else:
        found = summary.score
        score_text = f", {found[0]} {found[1]:.4f} on the test set" if found else ""
        restarts = f", {counted(len(summary.restarts), 'restart')}" if summary.restarts else ""
        start = f" (start {summary.startup_s:.1f} s)" if summary.startup_s else ""
        work = _script_end(run, summary) if run.script else counted(summary.steps, "step")
        lines += [f"{summary.state}: {work} in {summary.wall_s:.1f} s{start}{score_text}{restarts}"]
    lines += [f"tasks        {change}" for change in summary.membership[-SHOWN_CHANGES:]]
    if summary.goodput_split:
        lines += [f"time         {goodput.line(summary.goodput_split)}"]
    if every_s := summary.checkpoint_every_s:
        lines += [f"checkpoints  every {every_s:.1f} s"]
    lines += [f"pace         {found}" for found in stragglers.lines(summary.pace)]
    lines += [*reference.fault_lines(run), f"run folder   {shown_path}"]
    if mirrored := mirror.describe_mirror(run):
        lines += [f"mirror       {mirrored}"]
    if run.script:
        lines += [f"its files    {shown_path}/work/TASK"]
    if port:
        lines += [f"TensorBoard  {tensorboard.address(port)}"]
    first, *rest = _next_commands(run, summary.state)
    return [*lines, f"next         {first}", *(f"{'':13}{line}" for line in rest)]


def _next_commands(run: RunFolder, state: str) -> list[str]:
    """Return the hints about next commands; a long command has a separate line, to be copied."""
    resume = f"{COMMAND} up --resume {run.name}"
    if state == "stopped":
        return [resume]
    if state == "failed":
        return ["fix the cause, then:", resume]
    if run.script:
        return [f"{COMMAND} down (ends TensorBoard)"]
    config = run.load_config()
    longer = f"--epochs {2 * config.get('epochs', 3):g}"  # as long again
    if most := config.get("max_steps"):
        longer = f"--max-steps {2 * most}"
    return [f"{COMMAND} down (ends TensorBoard), or train on:", f"{resume} -- {longer}"]


def _script_end(run: RunFolder, summary: Summary) -> str:
    if summary.state == "stopped":
        return "every task's script ended"
    spec = run.load_cluster()
    serves = any(spec.serves(task) for task in spec.tasks)
    return "the chief's script ended with 0" if serves else "every task's script ended with 0"


def _failure(run: RunFolder, summary: Summary) -> list[str]:
    """Return the failures in a box, the root cause last."""
    cause = summary.failure or Cause()
    after = f"{summary.wall_s:.1f} s" if run.script else counted(summary.steps, "step")
    inside = [f"run {run.name} failed after {after}"]
    for name, code in summary.tasks.items():
        if name != cause.task and code:
            inside.append(f"{name}: {describe_exit(code)}, ended because of the other")
    for restart in summary.restarts:
        inside.append(f"restart {restart.generation}: {restart.task}, {restart.cause}")
    at = time.strftime("%H:%M:%S", time.localtime(cause.time))
    how = describe_exit(cause.exit_code) if cause.exit_code and cause.task and not run.script else ""
    how = "" if str(cause.error).startswith(how) else f", {how}"
    inside.append(f"root cause: {cause.task or 'the run'} at {at}{how}: {cause.error}")
    if cause.task:
        inside.append(f"its log: {COMMAND} logs {cause.task}")
    rule = "-" * min(100, terminal_width(), max(len(line) for line in inside))
    return [rule, *inside, rule]
