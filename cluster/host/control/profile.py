"""`invoke profile`: requests a trace of a task's next steps by the TensorFlow profiler, and waits for it.

The run folder has at most one request at a time. The task answers between two calls of its training loop
(`train/loops/actions.py`).

    python -m cluster.host.control.profile FOLDER

prepares a trace for TensorBoard's Profile tab, which caches its results in the trace's folder. TensorBoard's container
has only read access to the runs, so its tab cannot show an unprepared trace. The preparation runs in a separate process
because its library, one of TensorBoard's requirements in `.venv`, prints messages.
"""

import sys
import time
import uuid
from pathlib import Path
from urllib.parse import urlencode

from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import read_live_heartbeats
from cluster.contract.run.records import FINAL_STATES, TraceAnswer, TraceRequest
from cluster.contract.spec import Role
from cluster.host.runtime import tensorboard
from cluster.host.view.columns import plain_lines
from cluster.system import processes
from cluster.system.errors import RunFailed, TimedOut, UsageError
from cluster.system.files import ROOT, refuse_links, remove
from cluster.system.json_files import create_json
from cluster.system.messages import COMMAND, counted
from cluster.system.terminal import print_wait
from cluster.system.waiting import wait_until

PATIENCE_S = 120.0
"""Longest wait for a trace: time for the traced calls, for writing the trace, and for a restart in between."""
POLL_S = 0.1
TOOL = "trace_viewer@"
WORKING = frozenset({"training", "saving", "evaluating"})
CACHE_VERSION = "cache_version.txt"
"""The file in which the plugin records its version."""
CACHE_TIMEOUT_S = 60.0


def trace_task(run: RunFolder, name: str, steps: int, timeout_s: float = PATIENCE_S) -> list[str]:
    """Trace a task's next steps; return lines of text about the trace.

    Raises:
        UsageError: the task cannot be traced, or is being traced.
        RunFailed: the run ended before the trace, or the task failed to make it.
        TimedOut: there was no trace within `timeout_s`.
    """
    _check_task(run, name)
    request = TraceRequest(id=uuid.uuid4().hex, task=name, steps=steps, until=time.time() + timeout_s)
    _ask(run, request)
    print_wait(f"waiting until {name} has done {counted(steps, 'step')}")
    try:
        answer = _await(run, request, timeout_s)
    finally:
        current = records.read_record(run.trace_request, TraceRequest.from_json, None)
        if current and current.id == request.id:
            remove(run.trace_request)
    if answer.error is not None:
        raise RunFailed(f"{name} cannot be traced: {answer.error}; end the other trace, then try again")
    refuse_links(run.tensorboard(name))
    unprepared = [folder for folder in run.traces(name) if not (folder / CACHE_VERSION).exists()]
    prepared = [prepare_trace(folder) for folder in unprepared]
    failed = ["note         not prepared for the Profile tab in a container; `make setup` renews .venv"]
    return [*trace_lines(run, answer, steps), *([] if all(prepared) else failed)]


def _check_task(run: RunFolder, name: str) -> None:
    spec = run.load_cluster()
    task = spec.task(name)
    if run.script:
        advice = "call tf.profiler.experimental in it, or give its TensorBoard callback profile_batch"
        raise UsageError(f"run {run.name!r} runs a script, whose steps are unknown; {advice}")
    if run.outcome or run.load_summary():
        hint = f"`{COMMAND} up --resume {run.name}` continues it"
        raise UsageError(f"run {run.name!r} has ended, so nothing trains in it; {hint}")
    if spec.serves(task):
        raise UsageError(f"{name} only runs functions that the chief sends; `{COMMAND} profile chief`")
    if task.role == Role.EVALUATOR:
        raise UsageError(f"{name} takes no training steps; name one that does: `{COMMAND} profile chief`")
    if spec.kind.served and run.load_config().get("loop") == "fit":
        raise UsageError("Keras's fit under parameter servers does not report single steps; trace with --loop custom")
    beat = read_live_heartbeats(run, name).get(name)
    state = beat.state if beat else "not started"
    if state not in WORKING:
        then = f"see `{COMMAND} logs {name}`" if state in {*FINAL_STATES, "lost"} else "try again once it trains"
        raise UsageError(f"{name} is {state}, expected one that trains; {then} (`{COMMAND} status` shows it)")


@plain_lines
def trace_lines(run: RunFolder, answer: TraceAnswer, steps: int) -> list[str]:
    """Format the result of a trace as lines of text."""
    held = answer.last - answer.first + 1
    more = f", {counted(steps, 'step')} requested: whole calls of the training are traced" if held != steps else ""
    port = tensorboard.running_port(run.path.parent)
    newest = [f"{run.name}/tensorboard/{answer.task}/{folder.name}" for folder in run.traces(answer.task)[-1:]]
    tab = urlencode(({"run": newest[0]} if newest else {}) | {"tag": TOOL})  # the default tool is about GPUs
    where = f"{tensorboard.address(port)}/?{tab}#profile" if port else f"{COMMAND} tensorboard, then its Profile tab"
    return [
        f"{answer.task}: steps {answer.first} to {answer.last} traced ({held}{more})",
        f"trace        {run.name}/tensorboard/{answer.task}/plugins/profile",
        f"TensorBoard  {where}",
    ]


def _ask(run: RunFolder, request: TraceRequest) -> None:
    other = records.read_record(run.trace_request, TraceRequest.from_json, None)
    if other and other.until <= time.time():
        remove(run.trace_request)  # the command that requested it was killed
    if not create_json(run.trace_request, request.to_json(), TraceRequest.from_json):
        raise UsageError(f"a task of run {run.name!r} is being traced; wait until that is done, then try again")


def _await(run: RunFolder, request: TraceRequest, timeout_s: float) -> TraceAnswer:
    def answered() -> TraceAnswer | None:
        ended = run.outcome is not None  # before reading, so that a last answer is not missed
        answer = records.read_record(run.trace_answer, TraceAnswer.from_json, None)
        if answer and answer.id == request.id:
            return answer
        if ended:
            raise RunFailed(f"run {run.name!r} ended before {request.task} had traced its steps; nothing was written")
        return None

    if answer := wait_until(answered, timeout_s, POLL_S):
        return answer
    advice = f"it may be restarting or in a long call, see `{COMMAND} status`, then try again"
    raise TimedOut(f"no trace of {request.task} in {timeout_s:g} s; {advice}")


def prepare_trace(folder: Path) -> bool:
    """Prepare a trace's folder for the Profile tab; return False on failure, which matters only for a container."""
    command = [sys.executable, "-m", "cluster.host.control.profile", str(folder)]
    return processes.run(command, CACHE_TIMEOUT_S, cwd=ROOT)[0] == 0


def _write_cache(folder: Path) -> None:
    from xprof import version
    from xprof.convert import raw_to_tool_data

    traces = [str(path) for path in folder.glob("*.xplane.pb")]
    hosts = [Path(path).name.removesuffix(".xplane.pb") for path in traces]
    raw_to_tool_data.xspace_to_tool_names(traces)
    for tool in (TOOL, "overview_page"):
        data, _ = raw_to_tool_data.xspace_to_tool_data(traces, tool, {"trace_viewer_options": {}, "hosts": hosts})
        if not data:
            sys.exit(f"{folder}: no {tool} can be made of {traces}")
    (folder / CACHE_VERSION).write_text(version.__version__)


if __name__ == "__main__":
    _write_cache(Path(sys.argv[1]))
