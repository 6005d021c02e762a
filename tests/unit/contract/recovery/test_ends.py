"""How an end is read: whose doing it was, and which of the last lines is the error."""

import os
import signal
import sys
from pathlib import Path

import pytest

from cluster.agent.task_process import Trainer
from cluster.contract.recovery import ends
from cluster.contract.recovery.attempt_limits import EXTERNAL, PROGRAM_FAILURE
from cluster.system import memory

PROGRESS = "print('step 2/50 epoch 0.20 loss', flush=True)\n"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        *[(code, PROGRAM_FAILURE) for code in (0, 1, 5, 70, 75, 137, 255)],
        *[
            (-number, PROGRAM_FAILURE)
            for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGBUS)
        ],
        *[(-number, EXTERNAL) for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)],
    ],
)
def test_whose_doing_an_end_is(code, kind):
    assert kind == ends.classify_code(code, out_of_memory=False)
    assert PROGRAM_FAILURE == ends.classify_code(code, out_of_memory=True)


def error_of(tmp_path: Path, lines: str) -> tuple[int, str | None]:
    """Return the code of a real program with these lines, and the error that is read from what it printed."""
    program = Trainer(
        [sys.executable, "-X", "faulthandler", "-c", PROGRESS + lines], dict(os.environ), tmp_path / "log", tmp_path
    )
    code = program.wait(30)
    program.end(0)
    return code, program.error(code)


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ("raise ValueError('a bug')", "ValueError: a bug"),
        ("raise ValueError('expected\\n  this\\n\\ntoday')", "ValueError: expected this today"),
        ("class Odd(Exception): pass\nraise Odd", "Odd"),
        ("class Odd(Exception): pass\nraise Odd('so: so')", "Odd: so: so"),
        ("try: 1 / 0\nexcept ZeroDivisionError as e: raise KeyError('b') from e", "KeyError: 'b'"),
        ("raise ExceptionGroup('two', [ValueError('a'), TypeError('b')])", "TypeError: b"),
        ("import sys; sys.exit('error: loss is nan at step 3')", "loss is nan at step 3"),
        (
            "import sys, traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\n"
            "sys.exit('error: the disk is full')",
            "the disk is full",
        ),
        ("import atexit; atexit.register(print, 'warning: a'); raise ValueError('a bug')", "ValueError: a bug"),
        ("import os; os.write(2, b'warning: a'); os._exit(9)", "exit code 9, last line: step 2/50 epoch 0.20 loss"),
        ("import os; os.kill(os.getpid(), 9)", None),
    ],
)
def test_the_error_is_what_the_program_says_and_not_the_last_line(tmp_path, lines, error):
    assert error == error_of(tmp_path, lines)[1]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL])
def test_a_crash_in_native_code_names_the_call(tmp_path, number):
    waits = "import os, threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    code, error = error_of(tmp_path, f"{waits}\ndef forward(): os.kill(os.getpid(), {int(number)})\nforward()")
    assert (-number, "in forward (<string>:3)") == (code, error)


def test_what_native_code_says_before_it_aborts_is_the_error_and_what_it_logs_behind_one_is_not():
    said = ["step 2", "F0000 00:00:17 7 tensor.cc:5] Check failed: a == b (1 vs. 2)", "*** stack ***"]
    assert "Check failed: a == b (1 vs. 2)" == ends.find_error(said, -signal.SIGABRT)
    logged = [
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in <module>',
        "2026-11-22 05:52:23.1: W tensorflow/core/a.cc:1] careful",
        "ValueError: a",
        "  b",
        "W0000 00:00:1700000000.1 7 a.cc:1] careful",
    ]
    assert "ValueError: a b" == ends.find_error(logged, 70)


@pytest.mark.parametrize("lines", [1, 300])
def test_the_advice_at_the_end_of_a_long_error_is_kept(tmp_path, lines):
    attributes = "\n".join(["attr " + "x" * (6000 // lines)] * lines)
    message = f"Did not find a shardable source\n{attributes}\n. Consider the policy AutoShardPolicy.DATA"
    _, error = error_of(tmp_path, f"raise ValueError({message!r})")
    assert error is not None
    assert error.startswith("ValueError: Did not find a shardable source")
    assert error.endswith("Consider the policy AutoShardPolicy.DATA")


def test_terminal_codes_and_progress_bars_are_no_part_of_an_error(tmp_path):
    """Keras colours its messages, and prints an error behind the bar of a batch that it was drawing."""
    bar = "".join("\b" * 30 + "\r" + f"\x1b[1m{at}/9\x1b[0m ---- loss: 0.5" for at in range(1, 9))
    message = "Exception encountered when calling Dense.call().\n\n\x1b[1mwrong shape\x1b[0m"
    lines = f"import sys\nsys.stdout.write({bar!r}); sys.stdout.flush()\nraise ValueError({message!r})"
    assert "ValueError: Exception encountered when calling Dense.call(). wrong shape" == error_of(tmp_path, lines)[1]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ("3,1,900000000,-;Out of memory: Killed process 77 (python) total-vm:1kB", True),
        ("3,1,900000000,-;Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB", True),
        ("3,1,900000000,-;Out of memory: Killed process 7 (python) total-vm:1kB", False),
        ("3,1,300000000,-;Out of memory: Killed process 77 (python) total-vm:1kB", False),  # another one before
        ("6,1,900000000,-;usb 1-1: new device 77", False),
    ],
)
def test_memory_is_reported_where_the_kernel_log_says_so(monkeypatch, tmp_path, record, said):
    log = tmp_path / "kmsg"
    log.write_text(record + "\n")
    monkeypatch.setattr(memory, "KERNEL_LOG", log)
    monkeypatch.setattr(memory, "FIRST_NAMESPACE", Path("/proc/self/ns/pid").stat().st_ino)
    assert said == memory.in_kernel_log(77, 500.0)
    monkeypatch.setattr(memory, "KERNEL_LOG", tmp_path / "absent")
    assert not memory.in_kernel_log(77, 0.0)
    monkeypatch.setattr(memory, "KERNEL_LOG", log)
    monkeypatch.setattr(memory, "FIRST_NAMESPACE", 1)  # in a container its process ids are others
    assert not memory.in_kernel_log(77, 500.0)
