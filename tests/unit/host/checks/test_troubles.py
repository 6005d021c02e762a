"""Every row of the troubleshooting table, provoked: the line says what the table promises, with its exit code."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from invoke import Config, Context

from cluster.agent import rendezvous
from cluster.agent.attempt import Restarter
from cluster.agent.run_view import RunView
from cluster.agent.task_process import describe_end
from cluster.contract import compatibility, spec
from cluster.contract.recovery.attempt_limits import PROGRAM_FAILURE
from cluster.contract.recovery.ends import End
from cluster.contract.run import claim, owner, provenance
from cluster.contract.run.folder import RunFolder
from cluster.host.cli import command_line
from cluster.host.gpu import devices
from cluster.host.image import engine
from cluster.host.launch import configuration, folders, packages, startup, teardown
from cluster.host.options.request import Request
from cluster.host.runtime import resources, tensorboard
from cluster.host.runtime.local_runtime import LocalProcesses
from cluster.system import memory as system_memory
from cluster.system.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREREQUISITE,
    EXIT_TIMEOUT,
    EXIT_USAGE,
    ClusterError,
    PrerequisiteError,
)
from cluster.system.json_files import write_json
from cluster.system.paths import ROOT
from cluster.system.ports import free_ports
from tests.support.launching import no_shell

Provoked = tuple[str, int]
PROVOKE: dict[str, tuple[Callable[..., Provoked], int, str]] = {}
PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"
ROWS = re.findall(r"^\| `(.*?)` \| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)


@pytest.fixture
def program(tmp_path, monkeypatch) -> Callable[[str, str], Path]:
    """Puts a program of this name and text on the PATH."""

    def put(name: str, text: str) -> Path:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
        return path

    return put


def provokes(row: str, exit_code: int, fix: str = "") -> Callable[[Callable[..., Provoked]], object]:
    """Register a function that provokes the row of the table with this text.

    Args:
        row: text of one row only.
        exit_code: of the command.
        fix: part of the fix that the line on the screen has; empty where a log or another command has it.
    """

    def register(function: Callable[..., Provoked]) -> None:
        PROVOKE[row] = function, exit_code, fix

    return register


def refused(call: Callable[[], object]) -> Provoked:
    with pytest.raises(ClusterError) as caught:
        call()
    return str(caught.value), caught.value.exit_code


def make(folder: Path, *words: str) -> Provoked:
    """Run make in another folder; return the last error and the exit code of the recipe."""
    command = ["make", "--no-print-directory", "-f", str(ROOT / "Makefile"), "-C", str(folder), *words]
    environment = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    printed = done.stdout + done.stderr
    (line,) = re.findall(r"^error: .*$", printed, re.MULTILINE)
    (code,) = re.findall(r"Error (\d+)", printed)
    return line, int(code)


@provokes("python3 -m venv failed", EXIT_PREREQUISITE, "apt-get install python3-venv")
def _(tmp_path: Path, program: Callable[[str, str], Path]) -> Provoked:
    python = program("python3", '[ "$1" = -c ] && exit 0\necho "No module named venv" >&2\nexit 1')
    return make(tmp_path, f"PYTHON={python}", ".venv/bin/python")


@provokes("is 3.9.18", EXIT_PREREQUISITE, "PYTHON=python3.11")
def _(tmp_path: Path, program: Callable[[str, str], Path]) -> Provoked:
    old = "import sys; sys.version_info = (3, 9, 18); sys.version = '3.9.18 (main)'; exec(sys.argv[1])"
    python = program("python3", f'exec {sys.executable} -c {shlex.quote(old)} "$2"')
    line, code = make(tmp_path, f"PYTHON={python}", ".venv/bin/python")
    return line, code


@provokes("cannot be reached; behind a proxy", EXIT_FAILED, "HTTPS_PROXY")
def _(tmp_path: Path, program: Callable[[str, str], Path]) -> Provoked:
    python = program("python3", 'echo "ERROR: ProxyError(Cannot connect to proxy., NewConnectionError(...))"; exit 1')
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(python)
    (tmp_path / "requirements").symlink_to(ROOT / "requirements")
    return make(tmp_path, ".venv/.host")


@provokes("--requirements", EXIT_PREREQUISITE, "PIP_INDEX_URL")
def _(program: Callable[[str, str], Path]) -> Provoked:
    pip = program("pip", "echo 'WARNING: Retrying after connection broken by ProxyError(...)'; exit 1")
    return refused(lambda: packages._run([str(pip)], Path("mine.txt")))


@provokes("is in use by another program", EXIT_PREREQUISITE, "--port 6007")
def _(tmp_path: Path) -> Provoked:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return refused(lambda: tensorboard.start(tmp_path, taken.getsockname()[1], tensorboard.PROCESS, no_shell))


@provokes("MiB are free", EXIT_PREREQUISITE, "RUNS_DIR")
def _(monkeypatch: pytest.MonkeyPatch) -> Provoked:
    monkeypatch.setattr(startup.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    plan = SimpleNamespace(runtime=SimpleNamespace(preflight=lambda plan, ending: None), tensorboard_port=0)
    return refused(lambda: startup.check_machine(plan))  # type: ignore[arg-type]


@provokes("has no Compose", EXIT_PREREQUISITE, "install")
def _(program: Callable[[str, str], Path]) -> Provoked:
    program("docker", """[ "$1" = info ] && echo '"26.1"' && exit 0\necho "'compose' is no command" >&2; exit 1""")
    return refused(lambda: engine.demand("--runtime docker"))


@provokes("permission denied", EXIT_PREREQUISITE, "usermod -aG docker")
def _(program: Callable[[str, str], Path]) -> Provoked:
    program("docker", 'echo "permission denied while trying to connect to the Docker daemon socket" >&2; exit 1')
    return refused(lambda: engine.demand("--runtime docker"))


@provokes("set DOCKER_HOST", EXIT_PREREQUISITE, "systemctl start docker")
def _(program: Callable[[str, str], Path]) -> Provoked:
    program("docker", 'echo "Cannot connect to the Docker daemon. Is the docker daemon running?" >&2; exit 1')
    return refused(lambda: engine.demand("--runtime docker"))


@provokes("exists; resume it with", EXIT_USAGE, "--resume")
def _(make_run: Callable[..., RunFolder]) -> Provoked:
    run = make_run("mine")
    return refused(lambda: folders.check_folder(run, resumes=False, replaces=False))


@provokes("is not divisible", EXIT_USAGE, "-- --global-batch")
def _() -> Provoked:
    return refused(lambda: compatibility.check_global_batch(192, 5))


@provokes("override '--optimizer.learning-rat'", EXIT_USAGE, "learning-rate")
def _(tmp_path: Path) -> Provoked:
    request = Request(overrides=("--optimizer.learning-rat", "1"))
    return refused(lambda: configuration.resolve_config(request))


@provokes("ZeroDivisionError", EXIT_USAGE, ".py:")
def _(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Provoked:
    (tmp_path / "broken_preset.py").write_text("def preset():\n    return 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    request = Request(preset="broken_preset:preset")
    return refused(lambda: configuration.resolve_config(request))


@provokes("tasks need about", EXIT_PREREQUISITE, "use at most")
def _(monkeypatch: pytest.MonkeyPatch) -> Provoked:
    monkeypatch.setattr(system_memory, "available_bytes", lambda: 2**30)
    return refused(lambda: resources.check_free_memory(3))


@provokes("killed for memory", EXIT_FAILED, "--memory")
def _(monkeypatch: pytest.MonkeyPatch) -> Provoked:
    monkeypatch.setattr(system_memory, "limit_bytes", lambda: 2**31)
    return describe_end(-signal.SIGKILL, out_of_memory=True), EXIT_FAILED


@provokes("no GPU was found", EXIT_PREREQUISITE, "--gpus none")
def _(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Provoked:
    monkeypatch.setenv("PATH", str(tmp_path))
    return refused(lambda: devices.read_machine("--gpus 1"))


@provokes("TensorFlow sees", EXIT_PREREQUISITE, "--gpus none")
def _(monkeypatch: pytest.MonkeyPatch) -> Provoked:
    from train import strategy

    monkeypatch.setattr(strategy.tf.config, "list_physical_devices", lambda kind: [])
    monkeypatch.setenv("GPUS_GIVEN", "1")
    return refused(strategy.check_gpus)


# Later


@provokes("the cluster was not complete", EXIT_TIMEOUT)
def _() -> Provoked:
    cluster = spec.build(1, ports=free_ports(2))
    never = {"explain": lambda name: "never started"}
    return refused(
        lambda: rendezvous.hold_rendezvous(cluster, cluster.task("chief"), token="run/0", timeout_s=0.2, **never)
    )


@provokes("is being started by", EXIT_USAGE, "interrupt it")
def _(make_run: Callable[..., RunFolder]) -> Provoked:
    run = make_run("mine")

    def twice() -> None:
        with claim.hold_claim(run, "started"), claim.hold_claim(run, "resumed", wait_s=0):
            pass

    return refused(twice)


@provokes("in containers, which may", EXIT_PREREQUISITE, "invoke down")
def _(make_run: Callable[..., RunFolder], program: Callable[[str, str], Path]) -> Provoked:
    program("docker", 'echo "Cannot connect to the Docker daemon. Is the docker daemon running?" >&2; exit 1')
    run = make_run("mine")
    owner.create_owner(run, "docker")
    write_json(run.compose, {"runtime": "docker", "tasks": {}})
    return refused(lambda: teardown.find_leftovers(run.path.parent).check(None))


@provokes("did not end in", EXIT_TIMEOUT, "docker info")
def _(program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> Provoked:
    program("docker", "exec sleep 600")
    monkeypatch.setattr(engine, "COMPOSE_TIMEOUT_S", 0.2)
    context = Context(Config(overrides={"run": {"in_stream": False}}))
    return refused(lambda: command_line.shell(context)("docker compose ps"))


@provokes("no source", EXIT_PREREQUISITE, "copy the folder")
def _(tmp_path: Path) -> Provoked:
    from train.data.prepare import preparation

    def unreachable(*_: object) -> None:
        raise PrerequisiteError("no answer within 5 s")

    def missing() -> None:
        raise PrerequisiteError("none there")

    dataset = SimpleNamespace(decode=missing, source_files=list)
    folder = tmp_path / "fashion_mnist-3.0.1"
    return refused(lambda: preparation._decode_first("fashion_mnist", dataset, {"TFDS": unreachable}, tmp_path, folder))


@provokes("loss is nan", EXIT_FAILED)
def _() -> Provoked:
    from train.loops import actions

    error = actions.not_finite(float("nan"), 7)
    return str(error), error.exit_code


@provokes("is this machine on", EXIT_TIMEOUT, "network")
def _() -> Provoked:
    return cannot_listen("192.0.2.1", free_ports(1)[0])


@provokes("Address already in use", EXIT_FAILED, "end the program")
def _() -> Provoked:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return cannot_listen("127.0.0.1", taken.getsockname()[1])


def cannot_listen(host: str, port: int) -> Provoked:
    task = replace(spec.build(1, ports=free_ports(2)).task("worker-0"), host=host, port=port)
    return refused(
        lambda: rendezvous.open_task_listener(task, timeout_s=0, abandon=lambda: False, report=lambda obstacle: None)
    )


@provokes("failed 4 times", EXIT_FAILED)
def _(make_run: Callable[..., RunFolder]) -> Provoked:
    run = make_run(workers=1)
    cluster = run.load_cluster()
    policy = Restarter(RunView(run), cluster, cluster.task("worker-0"))
    policy._fail(End("worker-0", PROGRAM_FAILURE, "ended with exit code 1", "ValueError: x", 0.0, last_step=5), 4)
    return run.outcome.error, run.outcome.exit_code


@provokes("before it was done", EXIT_FAILED)
def _() -> Provoked:
    return describe_end(0, out_of_memory=False), EXIT_FAILED


@provokes("was not started by you", EXIT_USAGE, "--trust")
def _(make_run: Callable[..., RunFolder]) -> Provoked:
    run = make_run("mine")
    copied = RunFolder(run.path.rename(run.path.parent / "copied by hand"))
    return refused(lambda: provenance.check_trusted(copied))


@provokes("warning: TensorFlow's", EXIT_DONE)
def _() -> Provoked:
    return LocalProcesses().network("host", "", way_out="", serves=True).warning, EXIT_DONE


@provokes("is damaged", EXIT_FAILED, "restore it")
def _(make_run: Callable[..., RunFolder]) -> Provoked:
    run = make_run()
    run.cluster.write_text("{")
    return refused(run.load_cluster)


# The table


def pattern(sees: str) -> str:
    """Return a pattern of the line that a row shows: `...` stands for anything."""
    return ".*".join(map(re.escape, sees.split("...")))


@pytest.mark.parametrize("row", PROVOKE)
def test_a_trouble_is_seen_as_the_table_says(row, request):
    provoke, exit_code, fix = PROVOKE[row]
    (sees,) = (sees for sees, _, _ in ROWS if row in sees)
    names = provoke.__code__.co_varnames[: provoke.__code__.co_argcount]
    line, code = provoke(**{name: request.getfixturevalue(name) for name in names})
    assert re.search(pattern(sees), line.replace("`", "")), line
    assert fix in line
    assert exit_code == code
    assert "\n" not in line


def test_every_row_is_provoked():
    assert len(PROVOKE) == len(ROWS)
