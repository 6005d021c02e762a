"""Several commands on one run, as real processes: one continues, the other reports so and changes nothing."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.contract.run import claim, owner
from cluster.contract.run.folder import RunFolder
from cluster.host.control import ending, scaling
from cluster.host.launch import teardown
from cluster.host.runtime import supervisor
from cluster.system.errors import EXIT_DONE, EXIT_HUNG_UP, EXIT_INTERRUPTED, PrerequisiteError
from cluster.system.files import ROOT
from cluster.system.json_files import read_json
from tests import fast
from tests.support.launching import Commands
from tests.support.waiting import wait_for

SCRIPT = """
import os, pathlib, sys, time
here = pathlib.Path(__file__).parent
(here / f"started-{pathlib.Path(os.environ['RUN_DIR']).name}-{os.getpid()}").touch()
while not (here / "go").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def folder(theirs) -> Path:
    """The folder of a script that every `up` here runs; it ends once `go` is there."""
    theirs.write_text(SCRIPT)
    return theirs.parent


@pytest.fixture
def invoke(tmp_path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts `invoke` as a user does; everything is ended at the end."""
    commands: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-m", "invoke", *words]
        commands.append(
            subprocess.Popen(command, cwd=ROOT, text=True, env=os.environ | {"PATH": "/usr/bin:/bin"}, **pipes)
        )
        return commands[-1]

    yield start
    for command in commands:
        command.kill()
        command.communicate()
    for run in owner.recorded_runs(tmp_path / "runs"):
        supervisor.kill_run(run)


@pytest.fixture
def up(invoke, folder) -> Callable[[], "subprocess.Popen[str]"]:
    """Starts `invoke up` with the script on one local task; it then watches the run, and the script runs."""

    def start() -> "subprocess.Popen[str]":
        words = ("--name=one", "--runtime=local", "--workers=0", "--tensorboard-port=0", "--network=host")
        command = invoke("up", *words, f"--script={folder / 'fit.py'}")
        assert command.stdout
        assert any(line.startswith("run folder") for line in command.stdout), "up ended before"
        wait_for(lambda: list(folder.glob("started-*")), "the script")
        return command

    return start


def finished(*commands: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    outputs = [command.communicate(timeout=300) for command in commands]
    return [(command.returncode, *each) for command, each in zip(commands, outputs, strict=True)]


def test_down_ends_a_run_that_somebody_watches(up, invoke, tmp_path):
    watched = up()
    ((code, out, error),) = finished(invoke("down", "--timeout=0"))
    assert (EXIT_DONE, "") == (code, error)
    assert "one is down" in out
    ((code, out, error),) = finished(watched)
    assert EXIT_INTERRUPTED == code, (out, error)
    assert "stopped" in out
    assert [] == supervisor.processes_left(RunFolder(tmp_path / "runs" / "one"))


def test_a_second_signal_kills_a_script_that_does_not_listen(up, folder, tmp_path):
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    (folder / "fit.py").write_text(deaf + (folder / "fit.py").read_text())
    watched, run = up(), RunFolder(tmp_path / "runs" / "one")
    watched.send_signal(signal.SIGTERM)
    wait_for(lambda: run.stop_requested, "the request to stop")
    watched.send_signal(signal.SIGTERM)
    ((code, out, _),) = finished(watched)
    assert EXIT_INTERRUPTED == code
    assert "killing every task" in out
    assert [] == supervisor.processes_left(run)


def test_a_run_whose_terminal_is_closed_continues(up, folder, tmp_path):
    watched, run = up(), RunFolder(tmp_path / "runs" / "one")
    watched.send_signal(signal.SIGHUP)
    ((code, out, _),) = finished(watched)
    assert EXIT_HUNG_UP == code
    assert "continues in the background" in out
    assert ["SIGHUP"] == [event.detail["cause"] for event in run.events() if event.event == "unattended"]
    assert supervisor.is_running(run)
    (folder / "go").touch()
    assert "succeeded" == wait_for(lambda: read_json(run.summary, None), "the end")["state"]


def test_a_run_that_is_being_started_is_ended_once_it_is(make_run, start_gang):
    gang = start_gang("train(2), work()", workers=0)
    ended = threading.Thread(target=lambda: ending.end_run(gang.run, 0, Commands()))
    with claim.hold_claim(gang.run, "started"):
        ended.start()
        wait_for(lambda: gang.run.stop_requested, "the request to stop")
        assert supervisor.is_running(gang.run) or gang.run.outcome  # nobody kills what somebody else is at work on
    ended.join(60)
    assert [] == supervisor.processes_left(gang.run)
    assert "stopped" == read_json(gang.run.summary)["state"]


def test_a_resumed_run_is_neither_scaled_nor_removed_while_another_command_works_on_it(start_gang):
    gang = start_gang("train(2), work()", workers=0)
    gang.await_step("chief", 2)
    with claim.hold_claim(gang.run, "resumed"), pytest.raises(claim.Taken, match="is being resumed by process"):
        scaling.scale_run(gang.run, Commands(), workers=1)
    assert not gang.run.stop_requested
    assert not gang.run.summary.exists()  # as of a run that was resumed after a watcher saw it end
    assert "" == teardown.remove_ended(gang.run, Commands())
    assert supervisor.is_running(gang.run)


def test_a_claim_ends_with_its_process(run):
    lines = (
        "import sys, time; from pathlib import Path\n"
        "from cluster.contract.run import claim; from cluster.contract.run.folder import RunFolder\n"
        "with claim.hold_claim(RunFolder(Path(sys.argv[1])), 'started'):\n print('held', flush=True)\n time.sleep(600)"
    )
    command = [sys.executable, "-c", lines, str(run.path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert "held\n" == holder.stdout.readline()
        assert claim.is_held(run)
        message = f"run 'demo' is being started by process {holder.pid}"
        with pytest.raises(claim.Taken, match=message), claim.hold_claim(run, "ended", wait_s=0):
            pass
        holder.send_signal(signal.SIGKILL)
    with claim.hold_claim(run, "ended"):
        pass
    assert not claim.is_held(run)


def test_a_claim_that_cannot_be_made_says_what_to_do(tmp_path):
    (tmp_path / "runs").write_text("a file")
    run = RunFolder(tmp_path / "runs" / "one")
    with pytest.raises(PrerequisiteError, match="set RUNS_DIR"), claim.hold_claim(run, "started"):
        pass


@pytest.mark.parametrize(
    ("seed", "actions"),
    [
        pytest.param(1, 24, marks=pytest.mark.extended),
        *(pytest.param(seed, 1000, marks=pytest.mark.long) for seed in range(2, 12)),
    ],
)
def test_whatever_is_done_to_runs_leaves_them_usable_and_nothing_else(tmp_path, seed, actions):
    fast.leave_out("starts clusters")
    words = [str(tmp_path / "actions"), str(seed), str(actions)]
    command = [sys.executable, "-m", "tests.programs.random_actions", *words]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert 0 == done.returncode, done.stderr
