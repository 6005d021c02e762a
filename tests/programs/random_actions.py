"""Random commands on runs from two terminals, many of them killed; then checks what is left. A program for a test.

    python -m tests.programs.random_actions FOLDER SEED ACTIONS

The commands are those of `tasks.py`, forked from this process. The runs have real supervisors and agents, but training
programs without TensorFlow. Every few actions all commands are ended, and `Actions.check` looks at what is left.
"""

import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from invoke import Program

import tasks
from cluster.contract.run import claim
from cluster.contract.run.folder import RunFolder
from cluster.host.image import checkout
from cluster.host.launch import configuration, planning, startup
from cluster.host.options.request import Request
from cluster.host.reports import listing
from cluster.host.runtime import supervisor
from cluster.host.runtime.local_runtime import LocalProcesses, processes_of
from cluster.system.errors import UsageError
from cluster.system.json_files import read_json
from cluster.system.processes import ProcessTable
from tests.support.launching import CONFIG
from tests.support.waiting import wait_for

NAMES = ("first", "second", "third")
ROUND = 12
"""Actions between two checks."""
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LONGEST_S = 100.0
"""Longest time that a command may take: a stop may take 75 s."""
PROGRAM = """
import time
from tests.programs.trainer import *
from tests.programs.trainer import _stop
train(3 if not GENERATION else 5)
end = time.monotonic() + 4
until(lambda: _stop or time.monotonic() > end)
finish('stopped' if _stop else 'done')
"""


@dataclass
class Terminal:
    log: Path
    pid: int = 0
    began: float = 0.0
    words: list[str] = field(default_factory=list)
    code: int = 0
    """Exit code of the command that ended last."""

    def run(self, *words: str) -> None:
        self.words, self.began = list(words), time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.setsid()
                null, log = os.open(os.devnull, os.O_RDONLY), os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                for number, target in ((null, 0), (log, 1), (log, 2)):
                    os.dup2(number, target)
                print(f"$ invoke {' '.join(words)}", flush=True)
                Program(namespace=tasks.ns).run(["invoke", *words])
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except KeyboardInterrupt:  # before the command handles it
                code = 130
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    @property
    def busy(self) -> bool:
        if self.pid:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.pid, self.code = 0, os.waitstatus_to_exitcode(status)
        return self.pid != 0

    def signal(self, number: int) -> None:
        if self.busy:
            os.kill(self.pid, number)

    def wait(self) -> None:
        wait_for(lambda: not self.busy, f"the end of {self.words}", LONGEST_S)

    def call(self, *words: str) -> int:
        self.run(*words)
        self.wait()
        return self.code


class Actions:
    """The state of one sequence of random actions."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.runs_dir, self.tmp = folder / "runs", folder / "tmp"
        for made in (self.runs_dir, self.tmp):
            made.mkdir(parents=True, exist_ok=True)
        os.environ |= {"RUNS_DIR": str(self.runs_dir), "DATA_DIR": str(folder / "data"), "TMPDIR": str(self.tmp)}
        os.environ |= {"XDG_STATE_HOME": str(folder / "state")}
        tempfile.tempdir = None
        self.terminals = [Terminal(folder / f"terminal-{number}.log") for number in (1, 2)]

    def command(self) -> list[str]:
        name, workers = self.random.choice(NAMES), self.random.choice("001")
        start = ["--workers", workers, "--runtime", "local", "--network", "host", "--tensorboard-port", "0"]
        detach = ["--detach"] if self.random.random() < 0.5 else []
        choices = [
            *3 * [["up", "--name", name, *start, *detach]],
            ["up", "--name", name, "--fresh", *start, *detach],
            *2 * [["up", "--resume", name, *start, *detach]],
            *2 * [["scale", "--run", name, "--workers", self.random.choice("012")]],
            ["stop", name],
            ["down", name, "--timeout", "3"],
            ["down", "--timeout", "3"],
            ["clean", "--older", "0m", "--yes"],
            ["clean", name, "--yes"],
        ]
        return self.random.choice(choices)

    def act(self) -> None:
        """Start a command, or send a signal to one."""
        terminal = self.random.choice(self.terminals)
        if terminal.busy:
            assert time.monotonic() - terminal.began < LONGEST_S, f"{terminal.words} did not end"
            terminal.signal(self.random.choice(SIGNALS))
        else:
            terminal.run(*self.command())
        time.sleep(self.random.choice((0.0, 0.05, 0.3, 1.0)) * self.random.random())

    def check(self) -> None:
        """End all commands, and check what is left."""
        for terminal in self.terminals:
            terminal.signal(signal.SIGKILL)
            terminal.wait()
        for run in self.folders():
            assert run.cluster.exists() or run.incomplete, f"{run.path} is neither a run nor free"
            if not run.incomplete:
                self.check_resumable(run, may_run=True)
        terminal = self.terminals[0]
        assert 0 == terminal.call("down", "--timeout", "3"), "down failed"
        left = [run.name for run in self.folders() if supervisor.processes_left(run)]
        assert not left, f"processes of {left} are left"
        # One that was to import for a killed `up` notices that once it has started.
        wait_for(lambda: not self.processes(), "the end of all processes", 10.0)
        assert not (files := list(self.tmp.iterdir())), f"temporary files are left: {files}"
        listed = {row["run"] for row in listing.list_runs(self.runs_dir)}
        for run in self.folders():
            assert (run.name in listed) != run.incomplete, f"{run.name} is listed: {run.name in listed}"
            if run.name in listed:
                self.check_resumable(run, may_run=False)
        if self.random.random() < 0.3:
            assert 0 == terminal.call("clean", "--older", "0m", "--yes"), "clean failed"
            assert not self.folders(), f"{self.folders()} are left"
        for log in (each.log for each in self.terminals):
            text = log.read_text() if log.exists() else ""
            assert "Traceback" not in text, f"a command printed a traceback, see {log}"

    def check_resumable(self, run: RunFolder, *, may_run: bool) -> None:
        """Check that a run can be resumed, unless it has processes."""
        for may_end in (may_run, False):  # between the plan and the look for its processes
            try:
                planning.plan(Request(resume=run.name, runtime="local", tensorboard_port="0"))
            except UsageError as error:
                if may_run and "in progress" in str(error) and supervisor.processes_left(run):
                    return
                if not may_end:
                    raise AssertionError(f"{run.name} is not resumable: {error}") from error
            else:
                return

    def folders(self) -> list[RunFolder]:
        return [RunFolder(path) for path in sorted(self.runs_dir.iterdir()) if not path.name.startswith(".")]

    def processes(self) -> list[str]:
        """Return the commands of the processes that were started here and are still alive."""
        pids = ProcessTable().with_environment("RUNS_DIR", str(self.runs_dir)) - {os.getpid()}
        paths = [path for pid in pids if (path := Path(f"/proc/{pid}/cmdline")).exists()]
        return [path.read_bytes().replace(b"\0", b" ").decode() for path in paths]


def install() -> None:
    """Replace what needs TensorFlow or takes long, in this process and its forks."""

    def resolve(request: Request, base: Path | None, *_: Any) -> tuple[dict[str, Any], tuple[Path, ...], str]:
        return (read_json(base) if base else dict(CONFIG)), (), "none"

    def render(_: LocalProcesses, work: Any) -> dict[str, Any]:
        how = processes_of(work.cluster, work.run.path, work.data_dir, ["--", sys.executable, "-c", PROGRAM])
        return how | {"preload": "tests.programs.preloaded"}

    configuration.resolve_config = resolve
    LocalProcesses.render = render
    checkout.commit = lambda: None
    startup._tree = lambda folder: ""
    os.fsync = lambda descriptor: None
    assert claim.WAIT_S < LONGEST_S


def main(folder: Path, seed: int, number: int) -> None:
    install()
    actions = Actions(folder, seed)
    for at in range(number):
        try:
            actions.act()
            if at % ROUND == ROUND - 1 or at == number - 1:
                actions.check()
        except BaseException:
            print(f"seed {seed}, action {at}, see {folder}", file=sys.stderr, flush=True)
            for terminal in actions.terminals:
                terminal.signal(signal.SIGKILL)
            raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
