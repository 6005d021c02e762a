"""The user's code in our programs: errors are reported in one line, and every wait has a bound."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.host.launch import configuration
from cluster.host.options.request import Request
from cluster.system import processes
from cluster.system.errors import ClusterError, TimedOut, UsageError
from tests.support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[3]
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
    ],
)
def test_what_a_preset_prints_and_starts_is_no_part_of_the_answer(lines, resolve, capfd):
    assert 7 == resolve(lines)["seed"]
    printed = capfd.readouterr()
    assert "" == printed.out
    assert printed.err.count(FORGED) == lines.count(FORGED)


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
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(started.pid))\n"
        "def mine(): time.sleep(600)"
    )
    for limit_s in ("2", "20"):  # a loaded machine may not reach the preset in 2 s
        monkeypatch.setenv("PRESET_TIMEOUT_S", limit_s)
        with pytest.raises(TimedOut, match="PRESET_TIMEOUT_S"):
            resolve(source)
        if (tmp_path / "pid").exists():
            break
    started = int((tmp_path / "pid").read_text())
    wait_for(lambda: not processes.start_ticks(started), "the end of what it started")


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


def test_temporary_files_of_a_preset_are_removed(resolve, temporary_files):
    """As those of TensorFlow's autograph are, which a program that leaves with `os._exit` leaves behind."""
    lines = "import tempfile\ndef mine():\n    tempfile.mkstemp()\n    return TrainConfig(seed=7)"
    assert 7 == resolve(lines)["seed"]
    assert [] == list(temporary_files.iterdir())
