"""Errors in one line, each with what it is about, whatever the system or the user's own code says."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
from invoke import Context, Exit

from cluster.host.cli import command_line
from cluster.host.options.request import Request
from cluster.system.errors import UsageError
from cluster.system.messages import described, system_error
from cluster.system.paths import ROOT
from tests.support.launching import refusal


def failure_of(body: Callable[[], object]) -> OSError:
    with pytest.raises(OSError) as failed:
        body()
    return failed.value


def test_an_error_of_the_system_names_what_it_is_about(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    cases: list[tuple[OSError, str]] = [
        (failure_of((tmp_path / "a").read_text), f"{tmp_path}/a: No such file or directory"),
        (
            failure_of(lambda: os.rename(tmp_path / "a", tmp_path / "b")),  # noqa: PTH104
            f"{tmp_path}/a and {tmp_path}/b: No such file or directory",
        ),
        (failure_of(lambda: shutil.rmtree(tmp_path / "link")), "Cannot call rmtree on a symbolic link"),
        (failure_of(lambda: os.close(1_000_000)), "the system: Bad file descriptor"),
        (OSError("only\x1b[2Jwords"), "the system: only\\x1b[2Jwords"),
        (OSError(), "the system: OSError"),
        (OSError(errno.EIO, "I/O", b"/raw\xff"), "/raw\\udcff: I/O"),
    ]
    for error, expected in cases:
        assert expected in system_error(error)
        assert "None" not in system_error(error)


def exit_of(body: Callable[[Context], object]) -> tuple[int, str]:
    with pytest.raises(Exit) as ended:
        command_line.report_errors(body)(Context())
    return ended.value.code, str(ended.value.message)


def test_a_full_disk_without_a_name_is_reported_with_what_can_be_done():
    def body(_c: Context) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    code, message = exit_of(body)
    assert 1 == code
    assert "RUNS_DIR" in message
    assert "None" not in message


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
        raise ValueError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("a\nb\x1b[2J"), "ValueError: a b\\x1b[2J"),
        (Evil(), "Evil: it cannot be shown"),
        (SystemExit(), "it ends the program with sys.exit(None)"),
    ],
)
def test_an_error_of_the_user_s_own_is_one_line_that_only_shows(error, expected):
    assert expected == described(error)
    assert described(error).isprintable()


def test_a_folder_that_was_removed_is_reported(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, message = exit_of(lambda _c: None)
    assert (2, True) == (code, "current folder" in message)


def test_python_s_own_variables_do_not_reach_our_programs(monkeypatch):
    for name in ("PYTHONSAFEPATH", "PYTHONOPTIMIZE", "PYTHONINSPECT", "PYTHONWARNINGS", "PYTHONPATH"):
        monkeypatch.setenv(name, "1")
    command_line.normalise_environment()
    left = {name for name in os.environ if name.startswith("PYTHON")}
    assert {"PYTHONPATH"} == left - set(command_line.KEPT_VARIABLES[1:])


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"TF_CONFIG": "garbage"},
        {"PYTHONSAFEPATH": "1"},
        {"PYTHONOPTIMIZE": "2"},
        {"PYTHONWARNINGS": "error"},
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"HOME": ""},
        {"RUNS_DIR": "", "DATA_DIR": ""},
        {"TMPDIR": "/nowhere"},
        {"COLUMNS": "abc"},
    ],
)
def test_commands_work_in_an_unusual_environment(variables, tmp_path):
    preset, code = ("mnist", 0) if len(variables) < 2 else ("n\u00f6", 2)  # the error has to be encoded, too
    usual = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "RUNS_DIR": str(tmp_path / "runs")}
    command = [sys.executable, "-m", "invoke", "plan", "--runtime=local", "--workers=0", f"--preset={preset}"]
    done = subprocess.run(command, cwd=ROOT, env=usual | variables, capture_output=True, timeout=90, check=False)
    assert code == done.returncode, done.stderr
    errors = done.stderr.decode().splitlines()
    assert [code == 2] * len(errors) == [line.startswith("error: ") for line in errors]
    assert len(errors) == (code == 2)
