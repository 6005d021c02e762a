"""Tasks that are forked from their supervisor: to everything else they are like any other process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.contract import spec
from cluster.contract.run.folder import RunFolder
from cluster.host.launch import teardown
from cluster.host.nvidia import Placement
from cluster.host.runtime import supervisor
from cluster.host.runtime.local_runtime import processes_of
from cluster.system.json_files import read_json, write_json
from tests.support.gang import Gang, StartGang
from tests.support.waiting import wait_for

LOADED = """
from tests.programs import preloaded
(run.path / f"{NAME}.{GENERATION}.loaded").write_text(str(preloaded.loaded_by))
"""


@pytest.fixture
def start(start_gang) -> StartGang:
    return partial(start_gang, preload="tests.programs.preloaded")


@pytest.fixture
def before_start(monkeypatch) -> Callable[[Callable[[RunFolder], object]], None]:
    """Takes what is done to a run's folder before its supervisor starts."""

    def prepare(change: Callable[[RunFolder], object]) -> None:
        begin = supervisor.start_supervisor

        def changed(run: RunFolder) -> None:
            change(run)
            begin(run)

        monkeypatch.setattr(supervisor, "start_supervisor", changed)

    return prepare


def supervisor_of(gang: Gang) -> int:
    """Return the one child of the run's first process, which does nothing else than wait for it."""
    keeper = gang.keeper["pid"]
    return int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text())


def loaded_by(gang: Gang, generation: int = 0) -> dict[str, str]:
    return {path.name.split(".")[0]: path.read_text() for path in gang.run.path.glob(f"*.{generation}.loaded")}


def test_every_program_is_forked_from_the_supervisor_and_again_if_it_is_killed(start):
    gang = start(f"{LOADED}\ntrain(3)\nif not GENERATION: work()\ntrain(4), meet(), finish()", workers=1)
    loader = supervisor_of(gang)
    for task in ("chief", "worker-0"):
        gang.await_step(task, 3)
    os.kill(gang.pid("worker-0"), signal.SIGKILL)
    summary = gang.summary()
    assert ("succeeded", 1) == (summary["state"], len(summary["restarts"]))
    assert dict.fromkeys(("chief", "worker-0"), f"[{loader}]") == loaded_by(gang) == loaded_by(gang, generation=1)
    assert not gang.run.log("supervisor").read_text()


def test_a_run_is_under_way_while_it_imports_and_can_be_stopped(start, before_start):
    before_start(lambda run: (run.path / "import-lasts").touch())
    gang = start("train(2), finish()", workers=1)
    wait_for(lambda: len(gang.run.heartbeats()) == 2, "the heartbeats of both tasks")
    assert {"starting"} == {beat.state for beat in gang.run.heartbeats().values()}
    assert teardown.in_progress(gang.run)
    os.kill(supervisor_of(gang), signal.SIGTERM)
    wait_for(lambda: gang.run.stop_requested, "the request to stop")
    (gang.run.path / "import-lasts").unlink()
    assert ("stopped", []) == (gang.summary()["state"], gang.summary()["restarts"])


def test_if_the_import_fails_each_task_reports_it(start, before_start):
    before_start(lambda run: (run.path / "import-fails").touch())
    gang = start(f"{LOADED}\ntrain(2), meet(), finish()", workers=1)
    assert "succeeded" == gang.summary()["state"]
    assert {"chief": "[]", "worker-0": "[]"} == loaded_by(gang)
    assert gang.run.log("supervisor").read_text().endswith("ImportError: no such library\n")


@pytest.mark.parametrize("network", ["host", "private"])
def test_what_was_imported_for_a_run_that_was_refused_ends(network):
    lines = f"""
import os
from cluster.host.runtime.warm import EarlySupervisor, RunFolder, Path
how = {{"preload": "tests.programs.preloaded", "network": "{network}"}}
print(EarlySupervisor(RunFolder(Path("/none")), how, {{}}, "one").process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=60)
    wait_for(lambda: not Path(f"/proc/{int(done.stdout)}/stat").exists(), "its end")


def test_only_tasks_of_the_training_program_without_accelerator_are_forked(monkeypatch):
    def plan(command: list[str], gpus: Placement | None = None, **topology: Any) -> str | None:
        cluster = spec.build(workers=0, **topology).listening((7001,))
        return processes_of(cluster, Path("/runs/r"), Path("/data"), command, gpus=gpus).get("preload")

    assert "train.startup.preload" == plan([])
    assert plan(["--script", "/theirs.py"]) is None
    assert plan([], Placement({"chief": ("0",)})) is None
    assert plan([], strategy="tpu") is None
    monkeypatch.setenv("SHARED_IMPORT", "0")
    assert plan([]) is None


# Agents that import by themselves, as in containers


@pytest.fixture
def start_apart(start) -> StartGang:
    return partial(start, apart=True)


def test_an_agent_forks_every_program_and_reports_its_death_before_it_imports(start_apart):
    gang = start_apart(f"{LOADED}\ntrain(3)\nif not GENERATION: work()\ntrain(4), meet(), finish()", workers=1)
    gang.await_step("worker-0", 3)
    before = {name: f"[{gang.pid(name, 'agent')}]" for name in ("chief", "worker-0")}
    (gang.run.path / "import-lasts").touch()
    os.kill(gang.pid("worker-0", "agent"), signal.SIGKILL)
    wait_for(lambda: gang.run.generation == 1, "the next generation")
    wait_for(lambda: gang.beat("worker-0").generation == 1, "a heartbeat of the agent that imports")
    (gang.run.path / "import-lasts").unlink()
    assert ["the whole task was killed"] == [restart["cause"] for restart in gang.summary()["restarts"]]
    assert before == loaded_by(gang)
    after = loaded_by(gang, generation=1)
    assert before["chief"] == after["chief"]
    assert before["worker-0"] != after["worker-0"] != "[]"


def test_an_agent_that_comes_back_to_do_nothing_imports_nothing(start_apart):
    gang = start_apart("train(2)\nif NAME == 'chief': work()\nfinish()", workers=1)
    wait_for(lambda: gang.beat("worker-0").state == "done", "the end of worker-0's work")
    (gang.run.path / "import-fails").touch()
    os.kill(gang.pid("worker-0", "agent"), signal.SIGKILL)
    gang.run.request_stop("a test")
    assert "stopped" == gang.summary()["state"]
    beat = gang.beat("worker-0")
    assert 2 == beat.step
    assert not beat.importing


@pytest.mark.extended
@pytest.mark.parametrize(
    ("how", "variables"),
    [
        ("disabled", {"SHARED_IMPORT": "0"}),
        ("with GPUs", {"GPUS_GIVEN": "1"}),
        ("import-fails", {}),
        ("import-kills", {}),
    ],
)
def test_where_an_agent_cannot_import_each_program_does(start_apart, before_start, how, variables):
    def spoil(run: RunFolder) -> None:
        started = read_json(run.compose)
        for task in started["tasks"].values():
            task["environment"] |= variables
        write_json(run.compose, started)
        (run.path / how).touch()

    before_start(spoil)
    gang = start_apart(f"{LOADED}\ntrain(2), meet(), finish()", workers=1)
    assert ("succeeded", []) == (gang.summary()["state"], gang.summary()["restarts"])
    assert {"chief": "[]", "worker-0": "[]"} == loaded_by(gang)


# A forked process by itself. Its parent is a new process: the one that runs the tests has threads.

PARENT = """
import json, os, signal, subprocess, sys, threading
from cluster.system import fork_server
import types
sys.modules["nothing"] = types.SimpleNamespace(load=lambda: None)
fork_server.preload("nothing")
signal.signal(signal.SIGTERM, lambda *_: print("the parent's handler"))
os.environ["ONLY_THE_PARENTS"] = "1"
kept, other = os.pipe(), os.pipe()
def begin(code, **more):
    how = dict(env={"GIVEN": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) | more
    return fork_server.start([sys.executable, "-c", code, "word"], **how)
"""


@pytest.fixture
def parent(tmp_path) -> Callable[[str], Any]:
    """Runs lines in a process that may fork; returns their output, as JSON."""

    def run(lines: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", f"{PARENT}\n{lines}"], capture_output=True, text=True, timeout=300, check=True
        )
        assert not done.stderr
        return json.loads(done.stdout)

    return run


def test_a_forked_process_has_the_environment_files_and_arguments_it_was_given(parent):
    printed = parent('''
code = """
import json, os, sys
files = sorted(int(name) for name in os.listdir("/proc/self/fd"))
open_ones = [number for number in files if os.path.exists(f"/proc/self/fd/{number}")]
import tempfile
seen = [dict(os.environ), open_ones, sys.argv, os.readlink("/proc/self/fd/0"), tempfile.gettempdir(), os.getsid(0)]
print(json.dumps([*seen, open("/proc/self/comm").read()]))
"""
import tempfile
tempfile.gettempdir()
forked = begin(code, env={"TMPDIR": "/var/tmp", "TASK": "worker-0"}, pass_fds=(kept[0],), start_new_session=True)
said = json.loads(forked.stdout.read())
new = fork_server.start(["true"], env={}, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
kinds = [type(process).__name__ for process in (forked, new)]
print(json.dumps([said, kept[0], forked.pid, forked.wait(10) + new.wait(10), kinds]))
''')
    (environment, files, words, standard_input, temporary, session, name), kept, pid, code, kinds = printed
    assert ({"TMPDIR": "/var/tmp", "TASK": "worker-0"}, "worker-0\n") == (environment, name)
    assert (["-c", "word"], "/dev/null") == (words, standard_input)
    assert [0, 1, 2, kept] == files
    assert ("/var/tmp", pid, 0) == (temporary, session, code)
    assert ["ForkedProcess", "Popen"] == kinds  # another command than Python is a new process


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("import sys; sys.exit(7)", 7),
        ("raise SystemExit", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os; os._exit(5)", 5),
    ],
)
def test_a_forked_process_ends_as_a_new_one_would(parent, code, ended):
    assert ["a line\n", ended] == parent(f"""
forked = begin({"print('a line');" + code!r})
print(json.dumps([forked.stdout.read().decode(), forked.wait(10)]))
""")


def test_a_signal_right_after_the_fork_ends_the_process(parent):
    assert parent("""
signal.signal(signal.SIGTERM, lambda *_: None)
for _ in range(30):
    forked = begin("import signal; signal.pause()")
    forked.send_signal(signal.SIGTERM)
    assert forked.wait(10) == -signal.SIGTERM
print("true")
""")


def test_waiting_for_a_forked_process_has_a_timeout(parent):
    printed = parent("""
forked = begin("import signal; signal.pause()", process_group=0)
try:
    forked.wait(0.05)
except subprocess.TimeoutExpired as error:
    late = error.timeout
before = forked.poll()
assert os.getpgid(forked.pid) == forked.pid
forked.send_signal(signal.SIGTERM)
print(json.dumps([late, before, forked.wait(10), forked.poll()]))
""")
    assert [0.05, None, -signal.SIGTERM, -signal.SIGTERM] == printed
