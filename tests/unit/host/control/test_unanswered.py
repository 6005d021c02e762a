"""An engine that hangs, fails or is gone: nothing waits for it indefinitely, and what is left in it is named."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from invoke import Config, Context

import tasks
from cluster.contract.run import owner
from cluster.contract.run.folder import RunFolder
from cluster.host.cli import command_line
from cluster.host.control import foreground
from cluster.host.image import engine, images
from cluster.host.launch import configuration
from cluster.host.runtime import compose_runtime, supervisor, tensorboard
from cluster.system import processes
from cluster.system.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREREQUISITE, RunFailed, TimedOut
from cluster.system.json_files import read_json
from tests.support.beats import end
from tests.support.command_line import refusal
from tests.support.launching import Commands
from tests.support.waiting import wait_for

IMAGE = '{"Id": "sha256:1", "Config": {"Labels": {}}, "RootFS": {"Layers": ["sha256:0"]}}'
ANSWERS = f"""
case "$*" in
info*MemTotal*) echo 64000000000; exit;;
info*) echo '"26.1.5"'; exit;;
*'version --short') echo 2.26.1; exit;;
*'{{{{json .}}}}'*) echo '{IMAGE}'; exit;;
*RootFS*) echo '[[], []]'; exit;;
image*) echo '{{}}'; exit;;
esac
"""
"""What a client says of an engine that answers and has the images."""


@pytest.fixture
def client(docker, monkeypatch) -> Callable[[str], Path]:
    """Puts a `docker` with this script on the PATH, before the usual programs."""

    def put(script: str) -> Path:
        calls = docker(script)
        monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/bin:/bin")
        return calls

    return put


@pytest.fixture
def planned(monkeypatch) -> None:
    """Nothing asks the training program, and no image has to be built."""
    config = {"dataset": "mnist", "global_batch": 192}
    monkeypatch.setattr(configuration, "resolve_config", lambda *_: (config, (), "there"))
    monkeypatch.setattr(images, "pending_commands", lambda accelerator: [])


@pytest.fixture
def context() -> Context:
    return Context(Config(overrides={"run": command_line.HOW_COMMANDS_RUN}))


@pytest.mark.parametrize("asks", [False, True])
def test_a_client_that_hangs_is_ended_with_all_that_it_started(client, context, tmp_path, monkeypatch, asks):
    pid_file = tmp_path / "plugin"
    client(f"/bin/sh -c 'echo $$ >{pid_file}; exec /bin/sleep 600' & wait")  # its plugin holds on to its output
    monkeypatch.setattr(engine, "COMPOSE_TIMEOUT_S", 1.0)
    if asks:
        assert 124 == engine.ask("info", timeout_s=1)[0]
    else:
        with pytest.raises(TimedOut):
            command_line.shell(context)("docker compose up")
    wait_for(lambda: processes.start_ticks(int(pid_file.read_text())) is None, "the plugin's end")
    for words in ("docker compose up", "A=b docker compose -p x down", "docker build .", "docker import -"):
        assert engine.patience_s(words) is not None


def test_down_ends_local_runs_and_names_those_in_an_engine_that_is_gone(client, context, start_gang, make_run, capsys):
    client("echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    gang = start_gang("train(2), work()", workers=0)
    contained = make_run("contained")
    assert EXIT_DONE == refusal("down", context, run="contained")[0]  # nothing was in an engine
    owner.create_owner(contained, "docker")
    assert EXIT_PREREQUISITE == refusal("down", context, timeout="0")[0]
    assert [] == supervisor.processes_left(gang.run)
    (error,) = capsys.readouterr().err.splitlines()
    assert "contained" in error
    assert "Cannot connect" in error
    assert EXIT_PREREQUISITE == refusal("down", context, run="contained", timeout="0")[0]
    assert owner.read_owner(contained)  # the next `down` knows of it


def test_down_continues_after_a_run_that_cannot_be_ended(client, context, start_gang, make_run, capsys):
    first = make_run("a-first")
    owner.create_owner(first, "docker")
    project = compose_runtime.project(first.path)
    fails = "*' down '*) echo broken >&2; exit 9;;"
    client(f"{ANSWERS}\ncase \"$*\" in 'network ls'*) printf '{project}\\t\\n';; {fails} esac")
    gang = start_gang("train(2), work()", workers=0, name="later")
    assert 1 == refusal("down", context, timeout="0")[0]
    assert [] == supervisor.processes_left(gang.run)
    assert "later is down" in capsys.readouterr().out
    assert owner.read_owner(first)


def test_down_ends_what_a_removed_folder_left(client, context, tmp_path, capsys):
    runs = tmp_path / "runs"
    ours, others = compose_runtime.project(runs / "gone"), compose_runtime.project(tmp_path / "elsewhere" / "gone")
    calls = client(f"{ANSWERS}\ncase \"$*\" in 'ps --all'*) printf '{ours}\\tgone\\n{others}\\tgone\\n';; esac")
    assert EXIT_DONE == refusal("down", context, timeout="0")[0]
    (down,) = (line for line in calls.read_text().splitlines() if " down " in line)
    assert f"--project-name {ours} " in down
    assert "gone is down" in capsys.readouterr().out
    assert EXIT_DONE == refusal("down", context, run="gone", timeout="0")[0]


def test_a_run_whose_containers_cannot_be_removed_still_says_how_it_ended(run, capsys):
    owner.create_owner(run, "docker")
    end(run, "succeeded")
    sh = Mock(side_effect=RunFailed("the engine is gone"))
    assert EXIT_DONE == foreground.attend(run, "docker", 0, False, sh)
    shown = capsys.readouterr()
    assert "succeeded: " in shown.out
    assert "invoke down demo" in shown.err
    assert owner.read_owner(run)


@pytest.mark.parametrize("record", ["", "x", "[]", "{}", '{"runtime": "local", "port": 1}', '{"runtime": "docker"}'])
def test_a_damaged_record_is_not_a_tensorboard(tmp_path, record):
    (tmp_path / ".tensorboard.json").write_text(record)
    assert tensorboard.running_port(tmp_path) is None
    assert not tensorboard.stop(tmp_path, Commands())


def test_a_dry_run_only_asks_the_engine(client, planned, context, tmp_path, capsys):
    calls = client(ANSWERS)
    tasks.ns["up"](context, name="one", runtime="docker", dry=True)
    printed = capsys.readouterr().out.splitlines()
    assert " up --detach --no-build --pull never chief worker-0 worker-1" in printed[-2]
    assert "--profile tensorboard up --detach tensorboard" in printed[-1]
    assert {"info", "compose", "context", "image"} >= {call.split()[0] for call in calls.read_text().splitlines()}
    assert " up " not in calls.read_text()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("stops_at", ["build", "up"])
def test_an_engine_that_stops_leaves_nothing_behind(client, planned, context, tmp_path, monkeypatch, stops_at):
    calls = client(f"case \"$*\" in *'{stops_at} '*) exit 17;; esac{ANSWERS}")
    monkeypatch.setattr(images, "pending_commands", lambda accelerator: ["docker build ."])
    assert 1 == refusal("up", context, name="one", runtime="docker", tensorboard_port="0")[0]
    run_dir = tmp_path / "runs" / "one"
    *_, up, down = calls.read_text().splitlines()
    if stops_at == "build":
        assert not run_dir.exists()
        assert " up " not in calls.read_text()
        return
    assert str(run_dir / "compose.json") in up
    assert f" --project-name {compose_runtime.project(run_dir)} " in down
    assert down.endswith(" down --timeout 10 --volumes --remove-orphans")


@pytest.mark.parametrize("interrupts", [1, 2])
def test_an_interrupt_while_containers_start_ends_those_that_did(
    client, planned, context, tmp_path, monkeypatch, interrupts
):
    deaf = "trap '' INT; " if interrupts == 2 else ""
    calls = client(f"{ANSWERS}\ncase \"$*\" in *' up '*) {deaf}/bin/sleep 600 & wait $!;; esac")

    def interrupt() -> None:
        wait_for(lambda: noted and " up " in calls.read_text(), "the start")
        os.kill(os.getpid(), signal.SIGINT)
        if interrupts == 2:
            wait_for(lambda: len(noted) == 2, "the first interrupt to be passed on")
            os.kill(os.getpid(), signal.SIGINT)

    noted: list[str] = []
    wait = command_line.Runner.wait
    monkeypatch.setattr(command_line.Runner, "wait", lambda runner: (noted.append("waits"), wait(runner)))
    sender = threading.Thread(target=interrupt)
    sender.start()
    assert EXIT_INTERRUPTED == refusal("up", context, name="one", runtime="docker", tensorboard_port="0")[0]
    sender.join()
    run = RunFolder(tmp_path / "runs" / "one")
    _, down = (line for line in calls.read_text().splitlines() if " up " in line or " down " in line)
    assert f"--project-name {compose_runtime.project(run.path)} " in down
    assert "stopped" == read_json(run.summary)["state"]
    assert owner.read_owner(run) is None


@pytest.mark.docker
def test_an_engine_is_asked_for_what_a_removed_folder_left(context, tmp_path):
    project = compose_runtime.project(tmp_path / "runs" / "gone")
    labels = {
        "com.docker.compose.project": project,
        "com.docker.compose.network": "cluster",
        compose_runtime.RUN_LABEL: "gone",
    }
    words = [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]
    code, text = engine.ask("network", "create", *words, f"{project}_cluster")
    assert 0 == code, text
    try:
        assert EXIT_DONE == refusal("down", context, timeout="0")[0]
        assert "" == engine.ask("network", "ls", "--quiet", "--filter", f"label={compose_runtime.RUN_LABEL}=gone")[1]
    finally:
        engine.ask("network", "rm", f"{project}_cluster")
