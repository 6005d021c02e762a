"""The metrics of a run for Prometheus, and the process that serves them, outside the tasks' networks.

python -m cluster.host.launch.metrics_server RUN_DIR PORT   `metrics_server.toml` lists the metrics
"""

import contextlib
import os
import select
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cluster.contract.recovery import restart_costs
from cluster.contract.results import goodput, summary
from cluster.contract.run import heartbeat, owner
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import OutcomeState, TaskState
from cluster.host.view.status import chief_loss, read_status
from cluster.system import processes
from cluster.system.errors import PrerequisiteError
from cluster.system.ports import open_listener

METRICS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
HOST = "127.0.0.1"
ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
LOOK_S = 5.0
"""How often the process checks whether the run has ended."""
REQUEST_S = 2.0
"""Timeout of a request, in case of a slow client. Requests are answered one at a time."""
LINGER_S = 60.0
"""How long the final state of a run is served: four of Prometheus' usual scrape intervals."""


def address(port: int) -> str:
    """Return the URL of the metrics."""
    return f"http://{HOST}:{port}/metrics"


def check_port(port: int) -> None:
    """Check that metrics can be served on a port, 0 for none; raise PrerequisiteError if not."""
    try:
        open_listener(HOST, port).close()
    except OSError as error:
        problem = f"--metrics-port {port}: {HOST}:{port} cannot be used ({error.strerror})"
        raise PrerequisiteError(f"{problem}; choose another one, or leave it out") from error


def start(run: RunFolder, port: int) -> None:
    """Start the metrics server of a new run, if it has a port. The server ends with the run's other processes."""
    if port and (owned := owner.read_owner(run)):
        command = [sys.executable, "-m", "cluster.host.launch.metrics_server", str(run.path), str(port)]
        processes.start_detached(command, environment=os.environ | {owner.TOKEN: owned.token})


def render_metrics(run: RunFolder) -> str:
    """Return the metrics of a run in Prometheus' text format."""
    now, beats, ended, started = time.time(), run.heartbeats(), run.load_summary(), summary.start_time(run)
    # By the clocks, like the ages of heartbeats: it is only informative, and a reliable check would take seconds.
    silent = [name for name, beat in beats.items() if heartbeat.seems_old(beat)]
    value = read_status(run, heartbeat.with_lost(beats, silent), with_board=False)
    failures = restart_costs.failures(run, started)
    parts = (ended.goodput_split if ended else goodput.split(started, now, run.ledgers(), failures)) or {}
    value |= {
        "states": {each: int(each == (ended.state if ended else "running")) for each in ("running", *OutcomeState)},
        "loss": chief_loss(value),
        "logged": ended.metrics if ended else value.get("metrics", {}).get("chief"),
        "parts": parts,
        "goodput": goodput.share(parts),
        "restarts": len(restart_costs.costs(run, started)),
    }
    for task in value["tasks"]:
        task["states"] = {each: int(each == task["state"]) for each in TaskState}
        task["age_s"] = max(0.0, now - task["updated_at"])
    name_of_run = _label("run", run.name)
    tasks = [(f"{name_of_run},{_label('task', task['task'])}", task) for task in value["tasks"]]
    lines = []
    for name, metric in METRICS.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP tf_cluster_{name} {metric['help']}", f"# TYPE tf_cluster_{name} {kind}"]
        for labels, source in tasks if name.startswith("task_") else [(name_of_run, value)]:
            lines += [f"tf_cluster_{name}{{{text}}} {number}" for text, number in _series(metric, source, labels)]
    return "\n".join(lines) + "\n"


def _label(name: str, content: str) -> str:
    return f'{name}="{content.translate(ESCAPES)}"'


def _series(metric: Mapping[str, Any], source: Any, labels: str) -> list[tuple[str, float]]:
    """Return the labels, as text, and the value of each series of a metric, without missing values."""
    for key in metric["from"].split("."):
        source = (source or {}).get(key)
    numbers = {labels: source}
    if "label" in metric:
        numbers = {f"{labels},{_label(metric['label'], key)}": number for key, number in (source or {}).items()}
    return [(text, number * metric.get("factor", 1)) for text, number in numbers.items() if number is not None]


def answer(run: RunFolder, request: Mapping[str, Any], start_response: Callable[..., object]) -> list[bytes]:
    """Answer an HTTP request, as a WSGI application."""
    is_found = request["PATH_INFO"] == "/metrics"
    page = render_metrics(run).encode(errors="replace") if is_found else b"see /metrics\n"
    headers = [("Content-Type", "text/plain; version=0.0.4; charset=utf-8"), ("Content-Length", str(len(page)))]
    start_response("200 OK" if is_found else "404 Not Found", headers)
    return [] if request["REQUEST_METHOD"] == "HEAD" else [page]


def serve(run: RunFolder, port: int) -> None:
    """Serve the metrics of a run until its folder is deleted, or until `LINGER_S` after its end."""
    from wsgiref.simple_server import make_server  # here, as it would delay every command by 10 ms

    server, ended_at = make_server(HOST, port, lambda *request: answer(run, *request)), float("inf")
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    while run.cluster.exists() and time.monotonic() - ended_at < LINGER_S:
        if select.select([server], [], [], LOOK_S)[0]:
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, REQUEST_S)
                server.handle_request()
                signal.setitimer(signal.ITIMER_REAL, 0)
        ended_at = min(ended_at, time.monotonic()) if run.summary.exists() else float("inf")  # the run may be resumed


if __name__ == "__main__":
    os.nice(5)  # the training comes first
    serve(RunFolder(Path(sys.argv[1])), int(sys.argv[2]))
