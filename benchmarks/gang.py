"""The cost of the agents of many tasks on this machine, and the duration of start, kill, stop and end.

The programs do nothing (`benchmarks/stub.py`). strace counts the path system calls of one worker's agent and of the
chief's for a few seconds; the total is extrapolated.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks import slow_links
from benchmarks.figures import Figure, Goal
from benchmarks.runs import ROOT, Bench
from benchmarks.slow_links import Host
from cluster.contract import spec
from cluster.contract.run import provenance
from cluster.contract.run.folder import RunFolder
from cluster.host.runtime import supervisor
from cluster.host.runtime.local_runtime import processes_of
from cluster.system import memory, processes
from cluster.system.errors import PrerequisiteError, TimedOut
from cluster.system.json_files import read_json, write_json
from cluster.system.messages import counted
from cluster.system.ports import free_ports
from cluster.system.waiting import wait_until

COUNTS = (8, 16, 32, 64)
LARGEST = 256
"""Largest number of tasks, in one round only: starting them keeps two cores busy for minutes."""
APART = 64
"""Tasks on separate hosts, with slow links, in one round."""
STEADY_S = 10.0
STRACE_S = 4.0
LIMIT_S = 300.0
POLL_S = 0.02
TASK_BYTES = 60 * 2**20
"""The memory of an agent and its stub."""
_TOTAL = re.compile(r"^100\.00\s+\S+\s+\S+\s+(\d+)", re.MULTILINE)
"""The last line of `strace -c`."""


@dataclass
class Measured:
    """Samples measured with one number of tasks, one per round."""

    start_s: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)
    """Percentage of a core that an agent takes, averaged over all agents."""
    files: list[float] = field(default_factory=list)
    """Path system calls per second of all agents."""
    kill_s: list[float] = field(default_factory=list)
    again_s: list[float] = field(default_factory=list)
    stop_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)


def measure(bench: Bench) -> list[Figure]:
    """Run each number of tasks that fits into memory, in turn.

    Raises:
        PrerequisiteError: strace is missing.
    """
    _check_strace()
    counts = [count for count in (*COUNTS, LARGEST) if count * TASK_BYTES < memory.free_bytes()]
    found = {_name(count): Measured() for count in (counts[:1] if bench.quick else reversed(counts))}
    for turn in bench.turns():
        for count in counts[:1] if bench.quick else counts:
            if turn == 0 or count != LARGEST:
                _run(bench.folder / f"gang-{count}-{turn}", count, found[_name(count)])
    if refused := slow_links.refusal():
        bench.log(f"  gang with slow links is left out: {refused}")
    else:
        count = COUNTS[0] if bench.quick else APART
        with slow_links.hosts(count) as hosts:
            apart = found[f"{_name(count)}, {slow_links.TITLE}"] = Measured()
            _run(bench.folder / "gang-apart", count, apart, hosts)
    goals = {"share": Goal(1.0, at_least=False), "kill_s": Goal(0.5, at_least=False)}
    titles = {
        "start_s": ("start of all stub programs", "s"),
        "share": ("share of a core that an agent takes while its program trains", "%"),
        "files": ("path system calls of all agents, a second", "calls/s"),
        "kill_s": ("SIGKILL of a program until all other programs were ended", "s"),
        "again_s": ("SIGKILL of a program until all programs were started again", "s"),
        "stop_s": ("stop request to the outcome", "s"),
        "end_s": ("outcome to the end of all processes", "s"),
    }
    figures = []
    for name, (title, unit) in titles.items():
        main = _name(min(APART, counts[-1] if not bench.quick else counts[0]))
        names = [main, *(each for each in found if each != main)]
        variants = {each: getattr(found[each], name) for each in names}
        short = name.removesuffix("_s")
        figures.append(Figure(f"gang-{short}", f"{main}: {title}", unit, variants, goal=goals.get(name)))
    return figures


def _name(count: int) -> str:
    return counted(count, "task")


def _check_strace() -> None:
    try:
        subprocess.run(["strace", "-V"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        raise PrerequisiteError("strace, which counts system calls, is not installed: apt-get install strace") from None


def _run(folder: Path, count: int, measured: Measured, hosts: Sequence[Host] = ()) -> None:
    """Bring up a cluster of stub programs, on separate hosts if there are any; disturb it, and stop it."""
    run = _prepare(folder, count, hosts)
    names = [task.name for task in run.load_cluster().tasks]
    began = time.monotonic()
    supervisor.start_supervisor(run)
    try:
        _await(lambda: _trains(run, names, 0), "the start")
        measured.start_s.append(time.monotonic() - began)
        _await(lambda: all(run.programs(name).exists() for name in names), "the programs' records")
        agents, programs = _pids(run, names, "agent"), _pids(run, names, "program")
        measured.share.append(_busy(agents))
        others = _path_calls(agents[1]) * (count - 1)
        measured.files.append(_path_calls(agents[0]) + others)
        began = time.monotonic()
        os.kill(programs[-1], signal.SIGKILL)
        _await(lambda: not any(processes.start_ticks(pid) for pid in programs), "the end of all programs")
        measured.kill_s.append(time.monotonic() - began)
        _await(lambda: _trains(run, names, 1), "the next generation")
        measured.again_s.append(time.monotonic() - began)
        began = time.monotonic()
        run.request_stop("the benchmark")
        _await(lambda: run.outcome is not None, "the outcome")
        measured.stop_s.append(time.monotonic() - began)
        began = time.monotonic()
        _await(lambda: not supervisor.is_running(run), "the end")
        measured.end_s.append(time.monotonic() - began)
    finally:
        supervisor.kill_run(run)


def _prepare(folder: Path, count: int, hosts: Sequence[Host]) -> RunFolder:
    """Return a run folder as `up` leaves it before the first task starts."""
    run = RunFolder(folder)
    run.create()
    cluster = spec.build(workers=count - 1)
    if not hosts:
        cluster = cluster.listening(free_ports(count))
    else:
        placed = tuple(replace(task, host=host.address) for task, host in zip(cluster.tasks, hosts, strict=True))
        cluster = replace(cluster, tasks=placed)
    write_json(run.cluster, cluster.to_json())
    write_json(run.config, {"global_batch": count})
    command = ["--", sys.executable, "-m", "benchmarks.stub"]
    more = {"STANDBY": "0", "RENDEZVOUS_TIMEOUT_S": f"{LIMIT_S:g}", "PYTHONPATH": str(ROOT)}
    composed = processes_of(cluster, run.path, folder / "data", command, more) | {"preload": "benchmarks.stub"}
    for how, host in zip(composed["tasks"].values(), hosts, strict=False):
        how["command"] = ["ip", "netns", "exec", host.space, *how["command"]]
    write_json(run.compose, composed)
    write_json(run.control / "started.json", {"time": time.time(), "runtime": "local"})
    run.begin_generation(0, resumed=False)
    provenance.write_note(run)
    return run


def _await(condition: Callable[[], object], what: str) -> None:
    if not wait_until(condition, LIMIT_S, POLL_S):
        raise TimedOut(f"{what}: not within {LIMIT_S:g} s")


def _trains(run: RunFolder, names: list[str], generation: int) -> bool:
    beats = [run.heartbeat(name) for name in names]
    return all(beat and (beat.state, beat.generation) == ("training", generation) for beat in beats)


def _pids(run: RunFolder, names: list[str], of: str) -> list[int]:
    return [read_json(run.programs(name))[of]["pid"] for name in names]


def _busy(pids: list[int]) -> float:
    """Return the percentage of a core that each of these processes takes on average."""

    def ticks() -> int:
        lines = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
        return sum(int(line[11]) + int(line[12]) for line in lines)

    before, began = ticks(), time.monotonic()
    time.sleep(STEADY_S)
    seconds = (ticks() - before) / os.sysconf("SC_CLK_TCK")
    return 100 * seconds / len(pids) / (time.monotonic() - began)


def _path_calls(pid: int) -> float:
    """Return the number of system calls per second of a process that take a path."""
    command = ["strace", "-f", "-c", "-e", "trace=%file", "-p", str(pid)]
    traced = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    time.sleep(STRACE_S)
    traced.send_signal(signal.SIGINT)
    _, printed = traced.communicate(timeout=30)
    total = _TOTAL.search(printed)
    return int(total[1]) / STRACE_S if total else 0.0
