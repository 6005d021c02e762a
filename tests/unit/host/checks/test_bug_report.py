"""`invoke env`: everything that a bug report needs, and nothing that names or exposes its author."""

import json
import os

import pytest
from invoke import MockContext

import tasks
from cluster.host.checks import bug_report
from cluster.host.image.engine import Answer
from cluster.system.paths import ROOT


@pytest.fixture
def printed(monkeypatch, capsys) -> str:
    """The block of a user with secrets."""
    monkeypatch.setenv("HOME", "/home/mallory")
    monkeypatch.setenv("RUNS_DIR", "/home/mallory/thesis/runs")
    monkeypatch.setenv("DOCKER_HOST", "tcp://admin:hunter2@10.0.0.1:2375")
    monkeypatch.setenv("HTTPS_PROXY", "https://mallory:swordfish@proxy:3128")
    monkeypatch.setenv("TF_SOMETHING_TOKEN", "t0ken")
    monkeypatch.setenv("MY_OWN_SECRET", "s3cret")
    monkeypatch.setenv("STANDBY", "0")
    complaint = f"no Docker Engine answers (cannot connect to {os.environ['DOCKER_HOST']})"
    monkeypatch.setattr(bug_report.engine, "probe", lambda: Answer(False, complaint))
    tasks.ns["env"](MockContext())
    return capsys.readouterr().out


def test_the_block_has_no_secret_and_no_user_name(printed):
    for secret in ("mallory", "hunter2", "swordfish", "t0ken", "s3cret", str(ROOT)):
        assert secret not in printed, secret


def test_the_block_says_what_runs_here(printed):
    names = [line.split("  ")[0] for line in printed.splitlines()]
    for name in ("tf-cluster", "python", "packages", "engine", "gpus", "limits", "disk", "variables"):
        assert name in names
    assert "~/thesis/runs" in printed
    assert "STANDBY=0" in printed
    assert "TF_SOMETHING_TOKEN" in printed
    assert ("```text", "```") == (printed.splitlines()[0], printed.splitlines()[-1])


def test_it_can_be_read_by_programs(capsys):
    tasks.ns["env"](MockContext(), json=True)
    assert "python" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ann/x", "/home/<user>/x"),
        ("/home/me/x", "~/x"),
        ("/home/men/x", "/home/<user>/x"),
        (f"{ROOT}/runs", "<checkout>/runs"),
        ("redis://u:p@h/0", "redis://<credentials>@h/0"),
    ],
)
def test_names_in_paths_are_replaced(monkeypatch, text, shown):
    monkeypatch.setenv("HOME", "/home/me")
    assert shown == bug_report.shareable(text)
