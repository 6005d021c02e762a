"""Fixtures of the unit tests."""

import contextlib
import functools
import itertools
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from cluster.contract.run import heartbeat, provenance
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HeartbeatWriter, LivenessMonitor
from cluster.host.control import foreground
from cluster.host.launch import configuration, planning, startup
from cluster.host.options.request import Request
from cluster.host.runtime import supervisor
from cluster.host.runtime.local_runtime import LocalProcesses, processes_of
from cluster.host.runtime.resources import HOST
from cluster.system.json_files import read_json, write_json
from tests import fast
from tests.support.gang import Gang, StartGang
from tests.support.launching import CONFIG, Commands


@pytest.fixture(autouse=True)
def unsynced(monkeypatch, tmp_path):
    """Nothing is flushed to the disk, because tests have no power failures, and nothing was or is imported early."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(LocalProcesses, "anticipate", lambda *_: None)  # no import of TensorFlow


@pytest.fixture
def temporary_files(tmp_path, monkeypatch) -> Path:
    """The folder of temporary files, which only this test uses."""
    (folder := tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture
def run(make_run) -> RunFolder:
    """A run of a chief and a worker."""
    return make_run("demo", workers=1)


@pytest.fixture
def start_run() -> Iterator[Callable[[RunFolder], Gang]]:
    """Starts the local processes of a run folder, and kills what is left of them at the end."""
    fast.leave_out("starts a cluster")
    started = []

    def start(run: RunFolder) -> Gang:
        started.append(run)
        supervisor.start_supervisor(run)
        return Gang(run)

    yield start
    for run in started:
        with contextlib.suppress(FileNotFoundError):
            supervisor.kill_run(run)


@pytest.fixture
def start_gang(make_run, start_run, tmp_path) -> StartGang:
    """Starts a cluster whose every task runs the given lines of Python.

    `imports` goes before the lines; `absent` tasks are in the cluster but never started; `preload` names a module with
    whose `load` the supervisor begins, or with `apart` each agent; `network` is `private` or `host`; `elastic` is what
    `started.json` says of `--min-workers`, `away` tasks are kept away until the test removes the file; `config` is
    added to the configuration; the other options are `spec.build`'s.
    """

    def start(
        lines: str,
        imports: str = "from tests.programs.trainer import *",
        absent: tuple[str, ...] = (),
        hang_timeout_s: float = 60,
        preload: str = "",
        apart: bool = False,
        network: str = HOST,
        elastic: Mapping[str, Any] = MappingProxyType({}),
        away: tuple[str, ...] = (),
        config: Mapping[str, Any] = MappingProxyType({}),
        **topology: Any,
    ) -> Gang:
        run = make_run(**topology)
        write_json(run.config, read_json(run.config) | config)
        program = [sys.executable, "-c", f"{imports}\n{lines}"]
        how = processes_of(run.load_cluster(), run.path, tmp_path / "data", ["--", *program], network=network)
        how |= {"tasks": {n: task for n, task in how["tasks"].items() if n not in absent}}
        if apart:
            agent = [sys.executable, "-m", "tests.programs.importing_agent", preload, *program]
            how["tasks"] = {name: task | {"command": agent} for name, task in how["tasks"].items()}
        write_json(run.compose, how | ({"preload": preload} if preload and not apart else {}))
        limits = {"hang_timeout_s": hang_timeout_s, **elastic}
        for name in away:
            run.away(name).parent.mkdir(exist_ok=True)
            run.away(name).touch()
            beat = HeartbeatWriter(run, run.load_cluster().task(name), 0)  # the supervisor's, which imports for all
            beat.update(importing=True)
            beat.write()
        write_json(run.control / "started.json", read_json(run.control / "started.json") | limits)
        provenance.write_note(run)
        return start_run(run)

    return start


@pytest.fixture
def hurried(monkeypatch):
    """Watchers whose clock advances by nearly a second per look."""
    ticks = itertools.count(0.0, 0.9)
    monkeypatch.setattr(foreground, "POLL_S", 0.001)
    monkeypatch.setattr(foreground, "LivenessMonitor", functools.partial(LivenessMonitor, clock=lambda: next(ticks)))
    monkeypatch.setattr(heartbeat, "SECOND_LOOK_S", 0.05)


@pytest.fixture
def resolved(monkeypatch):
    """The configuration, without the process that checks it."""
    monkeypatch.setattr(configuration, "resolve_config", lambda *_, **__: (dict(CONFIG), (), ""))


@pytest.fixture
def recorded_configuration(monkeypatch):
    """The configuration of the run that continues, without the process that checks it."""
    monkeypatch.setattr(configuration, "resolve_config", lambda request, base, *_: (read_json(base), (), ""))


@pytest.fixture
def stopped_run(monkeypatch) -> Callable[..., RunFolder]:
    """Starts a run of local processes, up to the processes themselves, and stops it; takes a request's options."""
    monkeypatch.setattr(supervisor, "start_supervisor", lambda run: None)

    def start(**requested: Any) -> RunFolder:
        planned = planning.plan(Request(**{"runtime": "local", "tensorboard_port": "0"} | requested))
        startup.start(planned, Commands(), began=time.time())
        planned.run.end("stopped")
        write_json(planned.run.summary, {"state": "stopped"})
        return planned.run

    return start


@pytest.fixture
def theirs(tmp_path) -> Path:
    """Somebody's script, in a folder that everybody may read."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    for path, mode in ((folder, 0o755), (folder / "fit.py", 0o644), (folder / "table.csv", 0o644)):
        path.touch()
        path.chmod(mode)
    return folder / "fit.py"


@pytest.fixture
def docker(tmp_path, monkeypatch) -> Callable[[str], Path]:
    """Puts a `docker` with this script on the PATH, alone; returns the file that lists how it was called."""

    def put(script: str) -> Path:
        program, calls = tmp_path / "bin" / "docker", tmp_path / "docker-calls"
        program.parent.mkdir()
        calls.touch()
        program.write_text(f'#!/bin/sh\necho "$*" >>{calls}\n{script}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(program.parent))
        return calls

    return put
