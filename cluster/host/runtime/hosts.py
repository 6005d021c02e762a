"""What the hosts of a Slurm site or a Swarm lack, from what a short task on each of them found."""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.contract import spec
from cluster.contract.findings import Finding
from cluster.contract.run.folder import RunFolder
from cluster.host.image import images
from cluster.host.runtime import compose_services, swarm_stack
from cluster.host.runtime.compose_services import Containers, task_user
from cluster.host.runtime.resources import Job
from cluster.host.runtime.swarm_stack import Stack
from cluster.system import processes
from cluster.system.errors import PrerequisiteError
from cluster.system.json_files import read_json, write_json
from cluster.system.paths import ROOT

SKEW_S = 2.0
"""Largest difference of two clocks that passes: heartbeats that are 8 s old count as lost."""
LAG_S = 3.0
"""Longest that passes until a host shows what another wrote, for the same reason."""
SLOW_MB_S = 50.0
"""Less than half of what gigabit Ethernet carries: gradients of a megabyte already take longer than a step."""


@dataclass(frozen=True)
class Fixes:
    """What to do where a host does not answer, does not see the data or does not reach another."""

    silent: str
    data: str
    network: str


def judge(
    hosts: Collection[str], reports: Collection[Mapping[str, Any]], errors: Mapping[str, str], fixes: Fixes
) -> list[Finding]:
    """Return the findings from the reports of `probe.examine`, or the errors by host (of all: by the empty name)."""
    missing = sorted({*hosts} - {each["node"] for each in reports})
    if missing:
        said = "; ".join(dict.fromkeys(errors.get(name) or errors.get("", "") or "no reason given" for name in missing))
        found = Finding("hosts", "failed", f"no answer from {', '.join(missing)}: {said}", fixes.silent)
    else:
        found = Finding("hosts", "ok", f"{len(hosts)} run the agent and see the folder of runs")
    if not reports:
        return [found]
    data = Finding("data on hosts", "ok", "its folder is there")
    if blind := sorted(each["node"] for each in reports if not each["data"]):
        data = Finding("data on hosts", "failed", f"not on {', '.join(blind)}", fixes.data)
    if missing:  # whom the others do not reach either
        return [found, data]
    network = Finding("network of hosts", "ok", "every host reaches every other")
    if unreached := [f"{each['node']}: {each['unreached']}" for each in reports if each["unreached"]]:
        network = Finding("network of hosts", "failed", unreached[0], fixes.network)
    measured = [each for each in reports if "skew_s" in each]
    return [found, data, network, *(_links(measured) if measured else [])]


def _links(reports: Collection[Mapping[str, Any]]) -> list[Finding]:
    """Return the findings about the folder that hosts share, their clocks, and the bandwidth between them."""
    lag_s = max(each["lag_s"] for each in reports)
    folder = Finding("shared folder", "ok", f"each host shows within {lag_s:.1f} s what another writes")
    if lag_s > LAG_S:
        late = max(reports, key=lambda each: each["lag_s"])["node"]
        fix = "mount it so that changes show at once, such as NFS with actimeo=1"
        folder = Finding("shared folder", "warning", f"{late} shows after {lag_s:.0f} s what others write", fix)
    skew, slowest = max(abs(each["skew_s"]) for each in reports), min(reports, key=lambda each: each["mb_per_s"])
    clocks = Finding("clocks", "ok", f"within {skew:.2f} s")
    if skew > SKEW_S:
        clocks = Finding("clocks", "warning", f"differ by up to {skew:.1f} s", "have every host keep time by NTP")
    speed = f"{slowest['mb_per_s']:,.0f} MB/s or more from each host to another at the same time"
    if slowest["mb_per_s"] < SLOW_MB_S:
        fix = "use the hosts' fastest network; larger batches and --micro-batches make fewer steps of the same work"
        return [folder, clocks, Finding("bandwidth of hosts", "warning", f"{slowest['node']} is slow: {speed}", fix)]
    return [folder, clocks, Finding("bandwidth of hosts", "ok", speed)]


SLURM_BUSY_S = 60
"""How long the nodes may be busy before the check gives up."""
SLURM_STEP_S = 240.0
OURS = "error: "
"""Start of a line that this checkout prints; those of Slurm name the program first."""
SLURM_JOIN_S = 20.0
"""How long each node waits for the others to see the folder of the check."""
SLURM_FIXES = Fixes(
    silent=f"let every node see {ROOT}, its environment and RUNS_DIR under these paths; wait where nodes are busy",
    data="set DATA_DIR to a shared folder",
    network="open ports 20000 to 31999 between the nodes, at the addresses that Slurm has",
)


def examine_slurm(runs_dir: Path, data_dir: Path) -> list[Finding]:
    """Return the findings about the nodes of a Slurm cluster, from one short step on all of them."""
    code, printed, complained = processes.run(
        ["sinfo", "--Node", "--noheader", "--format=%N", "--responding"], SLURM_STEP_S
    )
    nodes = sorted(set(printed.split()))
    if code or not nodes:
        return [Finding("hosts", "failed", f"sinfo names none: {complained.strip()[:200]}", "run this on a login node")]
    runs_dir.mkdir(parents=True, exist_ok=True)
    run = RunFolder(runs_dir / f".check-{secrets.token_hex(4)}")
    try:
        run.create()
        write_json(run.cluster, spec.build(workers=len(nodes) - 1).to_json())
        reports, error = _slurm_step(run, data_dir, len(nodes))
        return judge(nodes, reports, {"": error}, SLURM_FIXES)
    finally:
        shutil.rmtree(run.path, ignore_errors=True)


def _slurm_step(run: RunFolder, data_dir: Path, count: int) -> tuple[list[dict[str, Any]], str]:
    """Return the reports of the nodes, and the most telling error that was printed."""
    command = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--immediate={SLURM_BUSY_S}"]
    command += ["--time=5", "--job-name=tf-cluster-check", f"--chdir={ROOT}"]
    command += [f"--export=PATH,HOME,RUN_DIR={run.path},DATA_DIR={data_dir},RENDEZVOUS_TIMEOUT_S={SLURM_JOIN_S:g}"]
    _, printed, complained = processes.run(
        [*command, sys.executable, "-m", "cluster.agent.schedulers.slurm", "check"], SLURM_STEP_S
    )
    said = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    errors = [line for line in complained.splitlines() if "error" in line.lower()]
    errors.sort(key=lambda line: not line.startswith(OURS))  # which says more than `srun` about the same
    return said, errors[0].removeprefix(OURS)[:300] if errors else ""


SWARM_ANSWER_S = 120.0
"""Longest wait for every host's answer, in which one that lacks the image tries to pull it."""
SWARM_SHOW_S = 10.0
"""How long the folder of runs may take to show what a task that has ended wrote there."""
POLL_S = 0.5
SWARM_REMOVE_S = 90.0
SWARM_FIXES = Fixes(
    silent="every host needs the image (docs/guides/swarm.md), and RUNS_DIR as a shared folder under the same path",
    data="set DATA_DIR to a shared folder",
    network="open UDP 4789, and TCP and UDP 7946, between the hosts",
)


def examine_swarm(runs_dir: Path, data_dir: Path) -> list[Finding]:
    """Return the findings about the hosts of a Swarm, from a service on each of them that ends at once."""
    try:
        usable = [node for node in swarm_stack.list_nodes() if node.usable]
    except PrerequisiteError as error:
        return [Finding("hosts", "failed", str(error), "set DOCKER_HOST to a manager's engine")]
    runs_dir.mkdir(parents=True, exist_ok=True)
    data_dir.mkdir(parents=True, exist_ok=True)
    run = RunFolder(runs_dir / f".check-{secrets.token_hex(4)}")
    name = swarm_stack.stack_name(run.path)
    try:
        run.create()
        (run.control / "check").mkdir()
        cluster = spec.build(workers=len(usable) - 1)
        write_json(run.cluster, cluster.to_json())
        places = dict(zip((task.name for task in cluster.tasks), usable, strict=True))
        write_json(run.compose, _check_stack(cluster, run, data_dir, places))
        compose_services.let_tasks_read(runs_dir, data_dir)
        compose_services.give_to_tasks(run.path)
        swarm_stack.ask_manager(
            "stack", "deploy", "--detach=true", "--resolve-image=never", f"--compose-file={run.compose}", name
        )
        reports, errors = _swarm_answers(run, name, places)
        return judge([node.name for node in usable], reports, errors, SWARM_FIXES)
    except PrerequisiteError as error:
        return [Finding("hosts", "failed", str(error), SWARM_FIXES.silent)]
    finally:
        if name in swarm_stack.list_stacks():
            swarm_stack.ask_manager("stack", "rm", "--detach=false", name, timeout_s=SWARM_REMOVE_S)
        shutil.rmtree(run.path, ignore_errors=True)


def _check_stack(
    cluster: spec.ClusterSpec, run: RunFolder, data_dir: Path, places: dict[str, swarm_stack.Node]
) -> dict[str, Any]:
    """Return a stack with a task on each host, in a network like that of a run."""
    containers = Containers(run.path, data_dir, images.train_image("cpu"), task_user(), 0)
    rendered = swarm_stack.render_stack(cluster, Stack(containers, Job()), [])
    for task, service in rendered["services"].items():
        del service["healthcheck"]  # it writes no heartbeat
        service["entrypoint"] = ["python", "-m", "cluster.agent.schedulers.probe"]
        service["environment"]["NODE"] = places[task].name
        service["deploy"]["placement"] = {"constraints": [f"node.id=={places[task].id}"]}
        service["deploy"]["restart_policy"] = {"condition": "none"}
    return rendered


def _swarm_answers(
    run: RunFolder, name: str, places: dict[str, swarm_stack.Node]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the reports of the tasks, and why those of other hosts did not answer."""
    deadline, ended_at = time.monotonic() + SWARM_ANSWER_S, float("inf")
    while True:
        reports = {task: found for task in places if (found := read_json(run.probe(task), None))}
        tasks = swarm_stack.stack_tasks(name)
        ended = {task.service for task in tasks if task.state in ("rejected", "failed", "complete")}
        if ended >= set(places):
            ended_at = min(ended_at, time.monotonic())
        if set(reports) == set(places) or time.monotonic() > min(deadline, ended_at + SWARM_SHOW_S):
            break
        time.sleep(POLL_S)
    unseen = {task.service for task in tasks if task.state == "complete"} - set(reports)
    errors = {places[task.service].name: task.error for task in tasks if task.error and task.service in places}
    errors |= {places[task].name: "its RUNS_DIR is another folder" for task in unseen}
    return list(reports.values()), errors
