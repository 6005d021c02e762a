"""What the hosts of a Swarm have of what a run needs, by a service on each of them that ends at once."""

from __future__ import annotations

import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from cluster.contract import spec
from cluster.contract.findings import Finding
from cluster.contract.run.folder import RunFolder
from cluster.host.image import images
from cluster.host.runtime import hosts
from cluster.host.runtime.compose import access
from cluster.host.runtime.compose.overlay import Containers, task_user
from cluster.host.runtime.job import EMPTY
from cluster.host.runtime.swarm import nodes, stack
from cluster.host.runtime.swarm.stack import Stack
from cluster.system.errors import PrerequisiteError
from cluster.system.json_files import read_json, write_json

ANSWER_S = 120.0
"""Longest wait for every host's answer, in which one that lacks the image tries to pull it."""
SHOW_S = 10.0
"""How long the folder of runs may take to show what a task that has ended wrote there."""
POLL_S = 0.5
REMOVE_S = 90.0
FIXES = hosts.Fixes(
    silent="every host needs the image (docs/guides/swarm.md), and RUNS_DIR as a shared folder under the same path",
    data="set DATA_DIR to a shared folder",
    network="open UDP 4789, and TCP and UDP 7946, between the hosts",
)


def examine(runs_dir: Path, data_dir: Path) -> list[Finding]:
    """Return what the hosts have, each with its fix."""
    try:
        usable = [node for node in nodes.nodes() if node.usable]
    except PrerequisiteError as error:
        return [Finding("hosts", "failed", str(error), "set DOCKER_HOST to a manager's engine")]
    runs_dir.mkdir(parents=True, exist_ok=True)
    data_dir.mkdir(parents=True, exist_ok=True)
    run = RunFolder(runs_dir / f".check-{secrets.token_hex(4)}")
    name = stack.name(run.path)
    try:
        run.create()
        (run.control / "check").mkdir()
        cluster = spec.build(workers=len(usable) - 1)
        write_json(run.cluster, cluster.to_json())
        places = dict(zip((task.name for task in cluster.tasks), usable, strict=True))
        write_json(run.compose, _stack(cluster, run, data_dir, places))
        access.let_tasks_read(runs_dir, data_dir)
        access.give_to_tasks(run.path)
        nodes.ask("stack", "deploy", "--detach=true", "--resolve-image=never", f"--compose-file={run.compose}", name)
        reports, errors = _answers(run, name, places)
        return hosts.judge([node.name for node in usable], reports, errors, FIXES)
    except PrerequisiteError as error:
        return [Finding("hosts", "failed", str(error), FIXES.silent)]
    finally:
        if name in nodes.stacks():
            nodes.ask("stack", "rm", "--detach=false", name, timeout_s=REMOVE_S)
        shutil.rmtree(run.path, ignore_errors=True)


def _stack(cluster: spec.ClusterSpec, run: RunFolder, data_dir: Path, places: dict[str, nodes.Node]) -> dict[str, Any]:
    """Return a stack with a task on each host, in a network like that of a run."""
    containers = Containers(run.path, data_dir, images.train_image("cpu"), task_user(), 0)
    rendered = stack.render(cluster, Stack(containers, EMPTY), [])
    for task, service in rendered["services"].items():
        del service["healthcheck"]  # it writes no heartbeat
        service["entrypoint"] = ["python", "-m", "cluster.agent.schedulers.probe"]
        service["environment"]["NODE"] = places[task].name
        service["deploy"]["placement"] = {"constraints": [f"node.id=={places[task].id}"]}
        service["deploy"]["restart_policy"] = {"condition": "none"}
    return rendered


def _answers(run: RunFolder, name: str, places: dict[str, nodes.Node]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return what the tasks found, and why those of other hosts did not answer."""
    deadline, ended_at = time.monotonic() + ANSWER_S, float("inf")
    while True:
        reports = {task: found for task in places if (found := read_json(run.probe(task), None))}
        tasks = nodes.tasks(name)
        ended = {task.service for task in tasks if task.state in ("rejected", "failed", "complete")}
        if ended >= set(places):
            ended_at = min(ended_at, time.monotonic())
        if set(reports) == set(places) or time.monotonic() > min(deadline, ended_at + SHOW_S):
            break
        time.sleep(POLL_S)
    unseen = {task.service for task in tasks if task.state == "complete"} - set(reports)
    errors = {places[task.service].name: task.error for task in tasks if task.error and task.service in places}
    errors |= {places[task].name: "its RUNS_DIR is another folder" for task in unseen}
    return list(reports.values()), errors
