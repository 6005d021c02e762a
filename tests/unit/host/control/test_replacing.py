"""Starting a run's tasks again with changed code: for which runs, and until when."""

import shlex
import sys

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host.control import replacing
from cluster.host.launch import teardown
from cluster.host.runtime.compose_runtime import Compose
from cluster.host.runtime.registry import LOCAL
from cluster.system.errors import RunFailed, UsageError
from cluster.system.json_files import write_json


@pytest.fixture
def run(make_run, monkeypatch) -> RunFolder:
    """A run that is in progress in containers."""
    monkeypatch.setattr(teardown, "in_progress", lambda run: not run.load_summary())
    monkeypatch.setattr(replacing.registry, "of", lambda run: Compose())
    return make_run("demo", workers=1)


def compose(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Have a Python program take Compose's place."""
    monkeypatch.setattr(Compose, "watch", lambda self, run: shlex.join([sys.executable, "-c", program]))


def test_the_agents_must_know_of_it_until_compose_ends(run, monkeypatch):
    compose(monkeypatch, f"import pathlib, sys; sys.exit(7 if pathlib.Path({str(run.replaced)!r}).exists() else 0)")
    with pytest.raises(RunFailed, match="exit code 7"):
        replacing.watch(run, trust=True)
    assert not run.replaced.exists()


def test_a_request_to_stop_must_end_it(run, monkeypatch, capsys):
    run.request_stop("a test")
    compose(monkeypatch, "import time; time.sleep(600)")
    replacing.watch(run, trust=True)
    assert "demo is being stopped" in capsys.readouterr().out
    assert not run.replaced.exists()


def test_a_run_that_is_not_in_progress_must_be_refused(make_run):
    run = make_run("demo", workers=1)
    run.end("stopped", task="chief")
    with pytest.raises(UsageError):
        replacing.watch(run, trust=True)


def test_a_run_whose_records_were_changed_must_be_refused(run):
    write_json(run.compose, {"services": {}})  # as one of its tasks could
    with pytest.raises(UsageError):
        replacing.watch(run)


def test_local_processes_must_be_refused(run, monkeypatch):
    monkeypatch.setattr(replacing.registry, "of", lambda run: LOCAL)
    with pytest.raises(UsageError):
        replacing.watch(run, trust=True)
    assert not run.replaced.exists()
