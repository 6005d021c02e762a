"""A process that has imported serves the next runs as a new one would, and refuses those that it would not."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.contract import user_code
from cluster.contract.run import owner
from cluster.contract.run.folder import RunFolder
from cluster.host.control import ending
from cluster.host.runtime import loaded, namespaces, supervisor, warm
from cluster.system import processes
from cluster.system.errors import TimedOut
from cluster.system.files import ROOT
from cluster.system.json_files import read_json
from tests.support.gang import Gang
from tests.support.launching import no_shell
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow  # a file counts as settled after two seconds
MODULE = """
import os, pathlib
from cluster.system import memory
memory.is_short = pathlib.Path({short!r}).exists
os.environ["SET_BY_IMPORT"] = "1"
RATE = 1
def load(config, strategy):
    os.environ.setdefault("CHOSEN", str(config.get("chosen")))
"""
TELL = """
import json, theirs
told = {"rate": theirs.RATE, "folder": os.getcwd(), "variables": dict(os.environ)}
(run.path / f"{NAME}.json").write_text(json.dumps(told))
train(2), finish()
"""
OF_RUN = ("RUN_DIR", "TF_CONFIG", "TMPDIR", "GATE_FD", "SNAPSHOT_FILES", owner.TOKEN)
STAYS_S = 600.0
HOW = {"preload": "theirs", "network": "host"}


@pytest.fixture
def module(tmp_path, monkeypatch) -> Iterator[Path]:
    """What is imported for all tasks. What stays is found in this test's runtime folder, and ended with it."""
    file = tmp_path / "modules" / "theirs.py"
    file.parent.mkdir()
    (tmp_path / "runtime").mkdir()
    file.write_text(MODULE.format(short=str(tmp_path / "short")))
    wait_for(lambda: time.time() > file.stat().st_ctime + loaded.SETTLED_S + 0.1, "a file that has settled")
    monkeypatch.setenv("PYTHONPATH", str(file.parent))
    yield file
    warm.end()


@pytest.fixture
def early(module, make_run) -> Callable[..., warm.EarlySupervisor]:
    """Orders a supervisor, and waits for its imports."""

    def order(keep_s: float = STAYS_S, **config: str) -> warm.EarlySupervisor:
        found = warm.EarlySupervisor(RunFolder(module.parent / "none"), HOW, config, "one", keep_s)
        assert found.serves()
        return found

    return order


@pytest.fixture
def serving(early) -> int:
    """The process that stays after its first run was given up."""
    early()._connection.close()
    assert stays()
    return stays()


@pytest.fixture
def start(start_gang, monkeypatch, module) -> Callable[..., Gang]:
    """Starts a run that tells what its tasks have; `before_start` is called between its imports and its start."""

    def start(
        name: str,
        keep_s: float = 0.0,
        before_start: Callable[[warm.EarlySupervisor], object] = lambda early: None,
        **more: str,
    ) -> Gang:
        def begin(run: RunFolder) -> None:
            early = warm.EarlySupervisor(run, run.composed, run.load_config(), "multiworker", keep_s)
            assert early.serves()
            before_start(early)
            start_supervisor(run, early)

        start_supervisor = supervisor.start_supervisor
        with monkeypatch.context() as patched:
            patched.setattr(supervisor, "start_supervisor", begin)
            return start_gang(TELL, name=name, workers=1, preload="theirs", **more)

    return start


def told(gang: Gang) -> dict[str, object]:
    assert "succeeded" == gang.summary()["state"]
    value = read_json(gang.run.path / "worker-0.json")
    value["variables"] = {name: each for name, each in value["variables"].items() if name not in OF_RUN}
    return value


def stays() -> int:
    """Return the process that stays; 0 if there is none."""
    try:
        with warm._connect() as connection:
            return int.from_bytes(connection.getsockopt(1, 17, 4), sys.byteorder)  # SO_PEERCRED
    except OSError:
        return 0


def parent(pid: int) -> int:
    return int(processes.stat(pid)[1])


def test_runs_that_share_an_import_behave_like_runs_with_separate_imports(start, module):
    network = "host" if namespaces.refusal() else "private"
    orders: list[warm.EarlySupervisor] = []
    gang = start("cold", before_start=orders.append, network=network)
    cold = told(gang)
    assert [gang.keeper["pid"]] == [order.pid for order in orders]
    first = told(start("first", STAYS_S, network=network))
    serving, folder = stays(), module.parents[1] / "runtime" / "tf-cluster"
    (socket,) = folder.iterdir()
    assert os.geteuid() == socket.stat().st_uid
    assert [0o700, 0o700] == [path.stat().st_mode & 0o777 for path in (socket, folder)]
    gang = start("next", network=network)
    assert serving == parent(gang.keeper["pid"])
    assert cold == first == told(gang)
    assert ("1", "None") == (cold["variables"]["SET_BY_IMPORT"], cold["variables"]["CHOSEN"])


def test_a_run_whose_first_process_is_killed_leaves_nothing_and_the_warm_process_stays(start):
    start("first", STAYS_S).summary()
    serving, gang = stays(), start("killed")
    assert serving == parent(gang.keeper["pid"])
    found = processes.ProcessTable().with_environment(owner.TOKEN, owner.read_owner(gang.run).token)
    assert gang.keeper["pid"] in found
    supervisor.kill_run(gang.run)
    assert ([], serving) == (supervisor.processes_left(gang.run), stays())


@pytest.mark.parametrize("change", ["variable", "configuration", "limit", "umask", "content", "new module"])
def test_a_run_that_a_new_process_would_serve_otherwise_is_refused(early, serving, module, monkeypatch, change):
    config = {}
    before = resource.getrlimit(resource.RLIMIT_CORE), os.umask(0o022)
    if change == "variable":
        monkeypatch.setenv("TF_ANY", "1")
    elif change == "configuration":
        config["chosen"] = "another"
    elif change == "limit":
        soft, hard = before[0]
        resource.setrlimit(resource.RLIMIT_CORE, (0 if soft else hard, hard))
    elif change == "umask":
        os.umask(0o027)
    elif change == "content":
        times = (module.stat().st_atime_ns, module.stat().st_mtime_ns)
        module.write_text(module.read_text().replace("RATE = 1", "RATE = 2"))
        os.utime(module, ns=times)
    else:
        (module.parent / "another.py").touch()
    try:
        assert early(**config).process
        assert serving != stays()
    finally:
        os.umask(before[1])
        resource.setrlimit(resource.RLIMIT_CORE, before[0])


def test_what_changes_after_the_imports_and_before_the_start_is_imported_again(start, module):
    changed = module.read_text().replace("RATE = 1", "RATE = 2")
    assert 2 == told(start("changed", STAYS_S, lambda early: module.write_text(changed)))["rate"]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_hangs_or_was_killed_is_replaced(serving, number):
    os.kill(serving, number)
    began = time.monotonic()
    replaced = warm.EarlySupervisor(RunFolder(Path("/none")), HOW, {}, "one", STAYS_S)
    assert (True, True) == (replaced.process is not None, time.monotonic() - began < warm.ANSWER_S + 5)
    wait_for(lambda: not processes.start_ticks(serving), "its end")
    replaced.end()


def test_two_runs_at_once_are_both_served(early, serving):
    both = [early(), early()]
    assert [None, None] == [each.process for each in both]
    assert [serving, serving] == [parent(each.pid) for each in both]
    assert both[0].pid != both[1].pid


@pytest.mark.parametrize("planted", ["link to a folder", "folder for all", "link to a socket", "socket for all"])
def test_what_is_not_this_users_alone_is_not_used(early, serving, module, planted):
    folder = module.parents[1] / "runtime" / "tf-cluster"
    (socket,) = folder.iterdir()
    if planted == "link to a folder":
        folder.rename(folder.with_name("another"))
        folder.symlink_to("another")
    elif planted == "folder for all":
        folder.chmod(0o755)
    elif planted == "link to a socket":
        socket.rename(socket.with_name("another"))
        socket.symlink_to("another")
    else:
        socket.chmod(0o777)
    assert early(0.0).process
    assert bool(warm.refusal()) == ("folder" in planted)
    wait_for(lambda: not processes.start_ticks(serving), "its end")


@pytest.mark.parametrize("end", ["time", "memory", "down", "another"])
def test_what_stays_ends(early, serving, module, end):
    recorded = processes.identity(serving)
    if end == "time":
        early(0.1)._connection.close()
    elif end == "memory":
        (module.parents[1] / "short").touch()
    elif end == "down":
        assert 0 == ending.take_down(module.parents[1] / "runs", None, 1, no_shell)
    elif end == "another":
        (socket,) = (module.parents[1] / "runtime" / "tf-cluster").iterdir()
        socket.unlink()
    wait_for(lambda: not processes.alive(recorded), "its end")
    wait_for(lambda: not stays(), "the end of the fork's listener")  # its first action, which a busy machine delays


@pytest.mark.usefixtures("serving")
def test_a_fork_ends_with_the_command_that_ordered_it():
    lines = f"""
import os
from cluster.host.runtime.warm import EarlySupervisor, RunFolder, Path
early = EarlySupervisor(RunFolder(Path("/none")), {HOW}, {{}}, "one")
early.serves(), print(early.pid, early.process, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=60, check=False)
    pid, process = done.stdout.split()
    assert "None" == process
    wait_for(lambda: not processes.start_ticks(int(pid)), "its end")


def call(order: warm.EarlySupervisor, lines: str) -> Any:
    """Let it run a program that replies with an expression in its last line."""
    *body, value = textwrap.dedent(lines).strip().splitlines()
    body = ["import os, sys, time", "from cluster.contract import user_code", *body]
    program = "\n".join([*body, f"sys.exit(user_code.reply(lambda: {value}))"])
    return user_code.run(
        [sys.executable, "-c", program], "it", "PRESET_TIMEOUT_S", environment=os.environ, start=order.call
    )


@pytest.mark.parametrize("keep_s", [0.0, STAYS_S])
@pytest.mark.parametrize("network", ["host", "private"])
def test_programs_that_call_the_users_code_share_the_imports_and_the_machines_network(module, capfd, keep_s, network):
    if network == "private" and namespaces.refusal():
        pytest.skip("no private network here")
    run = RunFolder(module.parent / "none")
    order = warm.EarlySupervisor(run, HOW | {"network": network}, {}, "one", keep_s)
    here = str(Path("/proc/self/ns/net").readlink())
    shared = """
    print("printed")
    ["theirs" in sys.modules, os.readlink("/proc/self/ns/net"), os.getcwd(), os.environ.get("RUN_DIR")]
    """
    for _ in range(2):
        assert [True, here, str(ROOT), os.environ.get("RUN_DIR")] == call(order, shared)
    assert "printed\nprinted\n" == capfd.readouterr().err
    assert order.serves()
    assert (network == "host") == (here == str(Path(f"/proc/{order.pid}/ns/net").readlink()))
    order.end()


def test_a_program_that_hangs_is_killed_with_what_it_started_and_the_next_one_runs(module, tmp_path, monkeypatch):
    order = warm.EarlySupervisor(RunFolder(tmp_path / "none"), HOW, {}, "one")
    monkeypatch.setenv("PRESET_TIMEOUT_S", "3")
    hanging = f"""
    child = os.fork()
    if child:  # leaves the group that is killed
        os.setpgid(0, os.getpgid(os.getppid()))
    open({str(tmp_path / "pids")!r}, "a").write(f"{{os.getpid()}} ")
    time.sleep(600)
    """
    with pytest.raises(TimedOut):
        call(order, hanging)
    pids = (tmp_path / "pids").read_text().split()
    assert 2 == len(pids)
    wait_for(lambda: not any(processes.start_ticks(int(pid)) for pid in pids), "the end of both")
    assert "next" == call(order, "'next'")
    assert order.serves()
    order.end()


def test_a_program_ends_with_the_command_that_called_it(module, tmp_path):
    lines = f"""
from tests.unit.host.runtime.test_warm import *
order = warm.EarlySupervisor(RunFolder(Path("/none")), HOW, {{}}, "one")
call(order, "open({str(tmp_path / "pid")!r}, 'w').write(str(os.getpid()) + ' ')\\ntime.sleep(600)")
"""
    with subprocess.Popen([sys.executable, "-c", lines], cwd=ROOT) as calling:
        pid = wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the program")
        calling.kill()
    wait_for(lambda: not processes.start_ticks(int(pid)), "its end")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_without_the_imports_a_new_process_runs_the_program(module, monkeypatch, number):
    monkeypatch.setattr(supervisor, "START_S", 2.0)
    order = warm.EarlySupervisor(RunFolder(module.parent / "none"), HOW, {}, "one")
    assert order.process
    order.process.send_signal(number)
    assert not order._has_imported()
    assert -1 == order._connection.fileno()  # nothing waits again
    assert 7 == call(order, "os.environ.clear() or 7")
    assert not order.serves()
