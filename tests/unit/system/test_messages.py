"""Errors in one line, whatever the system or the user's own code says, imports without noise, and bounded waits."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from invoke import Context, Exit

from cluster.host.cli import command_line
from cluster.host.launch import configuration
from cluster.host.options.request import Request
from cluster.system import processes, terminal
from cluster.system.errors import ClusterError, TimedOut, UsageError
from cluster.system.files import ROOT
from cluster.system.messages import NOISE, described, system_error
from tests.support.launching import refusal
from tests.support.waiting import wait_for


def exit_of(body: Callable[[Context], object]) -> tuple[int, str]:
    with pytest.raises(Exit) as ended:
        command_line.report_errors(body)(Context())
    return ended.value.code, str(ended.value.message)


def test_an_error_of_the_system_names_what_it_is_about(tmp_path):
    for error, expected in (
        (OSError(errno.ENOENT, "No such file or directory", "/a"), "/a: No such file or directory"),
        (OSError(errno.ENOENT, "No such file", "/a", None, "/b"), "/a and /b: No such file"),
        (OSError(errno.EBADF, "Bad file descriptor"), "the system: Bad file descriptor"),
        (OSError("only\x1b[2Jwords"), "the system: only\\x1b[2Jwords"),
        (OSError(), "the system: OSError"),
        (OSError(errno.EIO, "I/O", b"/raw\xff"), "/raw\\udcff: I/O"),
    ):
        assert expected in system_error(error)
        assert "None" not in system_error(error)


def test_a_full_disk_and_a_removed_folder_are_reported(tmp_path, monkeypatch):
    def body(_c: Context) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    code, message = exit_of(body)
    assert (1, True, False) == (code, "RUNS_DIR" in message, "None" in message)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, message = exit_of(lambda _c: None)
    assert (2, True) == (code, "current folder" in message)


def test_a_linked_run_folder_is_not_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    for target in ("elsewhere", "nowhere"):
        (tmp_path / "runs" / target).symlink_to(tmp_path / target)
        refused = refusal(Request(name=target, fresh=True, runtime="local"))
        assert isinstance(refused, UsageError)
        assert str(tmp_path / target) in str(refused)


class Evil(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("a\nb\x1b[2J"), "ValueError: a b\\x1b[2J"),
        (Evil(), "Evil: it cannot be shown"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(), "it ends the program with sys.exit(None)"),
    ],
)
def test_an_error_of_the_user_s_own_is_one_line_that_only_shows(error, expected):
    assert expected == described(error)
    assert described(error).isprintable()


def test_python_s_own_variables_do_not_reach_our_programs(monkeypatch):
    for name in ("PYTHONSAFEPATH", "PYTHONOPTIMIZE", "PYTHONINSPECT", "PYTHONWARNINGS", "PYTHONPATH"):
        monkeypatch.setenv(name, "1")
    command_line.normalise_environment()
    left = {name for name in os.environ if name.startswith("PYTHON")}
    assert {"PYTHONPATH"} == left - set(command_line.KEPT_VARIABLES[1:])


def test_no_file_takes_the_place_of_a_closed_stream():
    lines = "import os, sys; from cluster.host.cli.command_line import normalise_environment as start; start(); "
    lines += "sys.stderr.flush(); sys.exit(os.open('/', os.O_RDONLY))"
    command = ["sh", "-c", f'exec {sys.executable} -c "{lines}" <&- 2>&-']
    assert 3 == subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [
        {"TF_CONFIG": "garbage", "COLUMNS": "abc", "TMPDIR": "/nowhere"},
        {"PYTHONSAFEPATH": "1", "PYTHONOPTIMIZE": "2", "PYTHONWARNINGS": "error"},
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"HOME": "", "RUNS_DIR": "", "DATA_DIR": ""},
    ],
)
def test_commands_work_in_an_unusual_environment(variables, tmp_path):
    preset, code = ("mnist", 0) if "TF_CONFIG" in variables else ("n\u00f6", 2)  # the error has to be encoded, too
    usual = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "RUNS_DIR": str(tmp_path / "runs")}
    command = [sys.executable, "-m", "invoke", "plan", "--runtime=local", "--workers=0", f"--preset={preset}"]
    done = subprocess.run(command, cwd=ROOT, env=usual | variables, capture_output=True, timeout=90, check=False)
    assert code == done.returncode, done.stderr
    errors = done.stderr.decode().splitlines()
    assert [code == 2] * len(errors) == [line.startswith("error: ") for line in errors]
    assert len(errors) == (code == 2)


def test_the_noise_is_left_out_and_nothing_else(capfd):
    with terminal.quiet_imports():
        for part in NOISE:
            os.write(2, b"I0000 00:00:1 7 port.cc:153] " + part + b" More.\n")
        print("their warning", file=sys.stderr)
        os.write(2, b"no line break")
    os.write(2, b", and on\n")
    assert "their warning\nno line break, and on\n" == capfd.readouterr().err


def test_what_was_printed_before_an_error_is_shown(capfd):
    with pytest.raises(ImportError), terminal.quiet_imports():  # noqa: PT012  # it prints before it fails
        os.write(2, b"cannot open a library\n")
        raise ImportError
    assert "cannot open a library\n" == capfd.readouterr().err


# The user's code in our programs: errors are reported in one line, and every wait has a bound


FORGED = '{"config": {}, "code_dirs": [], "data": "forged"}'


@pytest.fixture
def resolve(tmp_path, monkeypatch) -> Callable[[str], dict[str, object]]:
    """Resolves the configuration of a preset that is the function `mine` of these lines."""

    def of(lines: str) -> dict[str, object]:
        (tmp_path / "own_preset.py").write_text(f"from train.config import TrainConfig\n{lines}\n")
        monkeypatch.chdir(tmp_path)
        return configuration.resolve_config(Request(preset="own_preset:mine"))[0]

    return of


@pytest.mark.parametrize(
    "lines",
    [
        f"import os\nprint('{FORGED}')\ndef mine():\n    os.write(1, b'{FORGED}')\n    return TrainConfig(seed=7)",
        "import os, subprocess\nos.close(1)\ndef mine():\n    subprocess.Popen(['sleep', '600'])\n"
        "    return TrainConfig(seed=7)",
        # As TensorFlow's autograph does, whose files a program that leaves with `os._exit` leaves behind.
        "import tempfile\ndef mine():\n    tempfile.mkstemp()\n    return TrainConfig(seed=7)",
    ],
)
def test_what_a_preset_prints_starts_and_writes_is_not_part_of_the_answer(lines, resolve, capfd, temporary_files):
    assert 7 == resolve(lines)["seed"]
    printed = capfd.readouterr()
    assert "" == printed.out
    assert printed.err.count(FORGED) == lines.count(FORGED)
    assert [] == list(temporary_files.iterdir())


@pytest.mark.parametrize(
    "lines",
    [
        "import os\ndef mine(): os._exit(0)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
        "import sys\ndef mine(): sys.exit(0)",
        "class Evil(Exception):\n    def __str__(self): return 'a\\x1b[2J\\nb\\rc\\x07'\ndef mine(): raise Evil",
        "def mine(): return TrainConfig(epochs='\\x1b[2J')",
    ],
)
def test_a_preset_that_gives_nothing_is_refused_in_one_line(lines, resolve, capfd):
    with pytest.raises(ClusterError) as refused:
        resolve(lines)
    assert isinstance(refused.value, UsageError)
    assert "--preset 'own_preset:mine'" in str(refused.value)
    assert str(refused.value).isprintable()
    assert ("", "") == capfd.readouterr()


def test_a_preset_that_never_returns_is_ended_with_all_that_it_started(resolve, monkeypatch, tmp_path):
    source = (
        "import os, pathlib, subprocess, time\n"
        "started = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(tmp_path)!r}, str(started.pid)).touch()\n"
        "def mine(): time.sleep(600)"
    )
    for limit_s in ("2", "20"):  # a loaded machine may not reach the preset in 2 s
        monkeypatch.setenv("PRESET_TIMEOUT_S", limit_s)
        with pytest.raises(TimedOut, match="PRESET_TIMEOUT_S"):
            resolve(source)
        if pids := [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]:
            break
    wait_for(lambda: not processes.start_ticks(*pids), "the end of what it started")


def test_ctrl_c_ends_a_preset_that_never_returns(tmp_path):
    (tmp_path / "own_preset.py").write_text(
        f"import os, time\ndef mine():\n    open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}} ')\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "invoke", "--search-root", str(ROOT), "plan", "--preset", "own_preset:mine"]
    plan = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def started() -> int:
        text = (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else ""
        return int(text) if text.endswith(" ") else 0

    pid = wait_for(started, "the preset")
    os.kill(plan.pid, signal.SIGINT)
    _, message = plan.communicate(timeout=300)
    assert (130, "interrupted") == (plan.returncode, message.strip())
    wait_for(lambda: not processes.start_ticks(pid), "the preset's end")
