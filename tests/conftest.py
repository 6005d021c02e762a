"""What every test shares: separate folders, run folders, the engine, and the logs of a failed run."""

import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cluster.contract import spec
from cluster.contract.run import provenance
from cluster.contract.run.folder import RunFolder
from cluster.host import nvidia
from cluster.host.checks import doctor
from cluster.host.image import engine
from cluster.system import processes
from cluster.system.files import ROOT
from cluster.system.json_files import write_json
from cluster.system.ports import PORTS, free_ports

LAST_LINES = 15
NVIDIA = Path(__file__).parent / "unit" / "nvidia"
OF_TASKS = ("RUN_DIR", "TASK", "TF_CONFIG", "GENERATION", "RESTARTS", "GATE_FD", "RENDEZVOUS_TIMEOUT_S", "GPUS_GIVEN")
"""Variables that tasks are started with."""

# A shell that runs the suite in the background has it ignore SIGINT, and whatever it starts would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# So it is with SIGHUP under `nohup`; unlike an ignored signal, a handler is not inherited.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

FIRST_EPHEMERAL_PORT = 32768
"""Where Linux begins with the ports that it gives out by itself."""


def _refuse_fixed_ports(event: str, arguments: tuple[Any, ...]) -> None:
    """Fail a test that binds a port of its choice: a user's run, or its TensorBoard, may have it."""
    if event == "socket.bind" and isinstance(address := arguments[1], tuple):
        port = address[1]
        if 0 < port < FIRST_EPHEMERAL_PORT and port not in PORTS:  # those are tried until one is free
            raise AssertionError(f"a test binds port {port}: take a free one, or tensorboard_port='0'")


sys.addaudithook(_refuse_fixed_ports)


@pytest.fixture(scope="session", autouse=True)
def state(tmp_path_factory) -> Iterator[None]:
    """Folders of the tests' own for what a user configures, and for notes of which runs were started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("configuration")))
        patch.delenv("COLUMNS", raising=False)  # lines are not wrapped without a terminal; xdist sets it
        yield


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Undo what a program that ran inside a test set: other tests of this process would have its handlers."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def isolation(tmp_path, monkeypatch):
    """Runs and data in the test's own folder, and none of the variables that tasks are started with."""
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("STANDBY", "0")  # programs would start that no test waits for
    monkeypatch.setenv("RESTART_PAUSE_S", "0.01")
    for name in OF_TASKS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make_run(tmp_path) -> Callable[..., RunFolder]:
    """Makes a run folder as `invoke up` leaves it before the first task starts; takes `spec.build`'s options."""

    def make(name: str = "run", **topology: Any) -> RunFolder:
        cluster = spec.build(**topology)
        run = RunFolder(tmp_path / "runs" / name)
        run.create()
        write_json(run.cluster, cluster.listening(free_ports(len(cluster.tasks))).to_json())
        write_json(run.config, {"global_batch": 96})
        write_json(run.compose, {"runtime": "local", "tasks": {}})
        write_json(run.control / "started.json", {"time": time.time(), "runtime": "local"})
        run.begin_generation(0, resumed=False)
        provenance.write_note(run)
        return run

    return make


# What a machine may have


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Puts an `nvidia-smi` on the PATH that says what is recorded of a host; see `nvidia/README.md`."""

    def put(host: str) -> None:
        folder, program = shlex.quote(str(NVIDIA / host)), tmp_path / host / "nvidia-smi"
        program.parent.mkdir()
        program.write_text(
            f'#!/bin/sh\ncase "$*" in\n"{" ".join(nvidia.QUERY)}") exec /bin/cat {folder}/query.csv;;\n'
            f'"{" ".join(doctor.QUERY)}") exec /bin/cat {folder}/settings.csv;;\n'
            f'"topo -m") exec /bin/cat {folder}/topo.txt;;\n"-L") exec /bin/cat {folder}/list.txt;;\n'
            '*) echo "Invalid combination of input arguments." >&2; exit 2;;\nesac\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")

    return put


# What a machine may lack


def _unavailable(reason: str) -> NoReturn:
    """Skip the test; where CI=true fail it, so that a broken engine cannot pass for a green run."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI=true and {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def unavailable() -> Callable[[str], NoReturn]:
    """Ends a test for whose sake something would have to be installed: skipped, or failed where CI=true."""
    return _unavailable


@functools.cache
def _engine() -> engine.Availability:
    return engine.probe()


@pytest.fixture(scope="session")
def require_engine() -> engine.Availability:
    """The Docker Engine; a test that asks for it is skipped with the reason where none answers."""
    if not _engine().ready:
        _unavailable(_engine().detail)
    return _engine()


@pytest.fixture
def mount_disk(tmp_path) -> Iterator[Callable[[str], Path]]:
    """Mounts a disk of the given size, to be filled."""
    disk = tmp_path / "disk"

    def mount(size: str) -> Path:
        disk.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=False).returncode:
            pytest.skip("only root can mount a small disk, and not in every container")
        return disk

    yield mount
    if disk.is_mount():
        subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(scope="session")
def copy_checkout() -> Callable[..., None]:
    """Copies the files that git tracks to a folder, except those whose paths begin with the remaining arguments."""

    def copy(folder: Path, *left_out: str) -> None:
        code, listed, complaint = processes.run(["git", "-C", str(ROOT), "ls-files", "-z"], 60)
        if code:
            _unavailable(f"git does not list the files of {ROOT}: {complaint.strip()}")
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file() and not name.startswith(left_out):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)

    return copy


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Look for what a test needs before any of its fixtures uses it."""
    for program in [name for marker in item.iter_markers("needs") for name in marker.args]:
        if shutil.which(program) is None:
            _unavailable(f"{program} is not installed")
    if item.get_closest_marker("docker") and not _engine().ready:
        _unavailable(_engine().detail)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out of `make test`, which runs three files at a time, what must run alone or takes a minute or more."""
    for item in items:
        if item.get_closest_marker("alone") or item.get_closest_marker("extended"):
            item.add_marker("long")


# What is shown of a failure


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of the events and logs of the runs that a failed test had. pytest keeps their folders."""
    report = yield
    if report.failed:
        report.sections += [(f"run folder {path}", _last_words(path)) for path in _run_folders(item)]
    return report


def _run_folders(item: pytest.Item) -> Iterator[Path]:
    """Yield the run folders in the folders that the test's fixtures gave it."""
    found = set()
    for value in getattr(item, "funcargs", {}).values():
        folder = value.path if isinstance(value, RunFolder) else getattr(value, "runs_dir", value)
        if isinstance(folder, Path) and folder.is_dir():
            found |= {path.parent for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}cluster.json")}
    yield from sorted(found)


def _last_words(run: Path) -> str:
    lines = []
    for path in [run / "events.jsonl", *sorted(run.glob("logs/*.log"))]:
        if path.exists():
            lines += [f"--- {path.relative_to(run)}", *path.read_text(errors="replace").splitlines()[-LAST_LINES:]]
    return "\n".join(lines)
