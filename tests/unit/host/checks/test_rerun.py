"""A run made once more is compared step by step and bit by bit, and what differs between the machines is named."""

import json
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host.checks import rerun
from cluster.host.control import foreground
from cluster.host.launch import planning, startup
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, UsageError
from cluster.system.json_files import append_json, read_json, write_json
from tests.support.command_line import exit_code

LOSSES = {1: 2.3, 2: 2.2, 3: 2.0}


@pytest.fixture
def made(make_run) -> Callable[..., RunFolder]:

    def make(name: str, losses: dict[int, float] | None = None, sha256: str = "aa", **manifest: Any) -> RunFolder:
        run = make_run(name, workers=0)
        for step, loss in (losses or LOSSES).items():
            append_json(run.metrics("chief"), {"step": step, "loss": loss})
        append_json(run.metrics("chief"), {"step": 3, "eval_loss": 1.0})
        write_json(run.summary, {"state": "succeeded", "weights_sha256": sha256})
        write_json(run.manifest, {"run": name, "runtime": "local", "environment": {"cpu": {"model": "A"}}} | manifest)
        return run

    return make


@pytest.mark.parametrize(
    ("losses", "sha256", "expected", "from_step"),
    [
        (LOSSES, "aa", "identical", None),
        (LOSSES, "bb", "different", None),
        ({1: 2.3, 2: 2.2 * 1.01, 3: 1.8}, "bb", "different", 2),
        ({1: 2.3, 2: 2.2}, "aa", "different", None),  # a step is missing
    ],
)
def test_losses_and_weights_are_compared(made, monkeypatch, capsys, losses, sha256, expected, from_step):
    one, two = made("one"), made("two", losses, sha256)
    compared = rerun.compare_repeated(one, two)
    assert (expected, from_step) == (compared.verdict, compared.from_step)
    assert (sha256 == "aa") is compared.same_weights
    assert rerun.rerun_lines(two, compared)[0].startswith(f"{expected}: ")
    monkeypatch.setattr(rerun, "repeat_run", lambda *_, **__: print("data: ready") or (two, compared))
    assert (EXIT_DONE if expected == "identical" else EXIT_FAILED) == exit_code("rerun", "one", json=True)
    assert expected == json.loads(capsys.readouterr().out)["verdict"]  # and nothing else


CODE = {"commit": "a", "changes_sha256": None, "cluster_sha256": "1", "train_sha256": "2"}


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({"cluster": {"tasks": [{"port": 2}]}}, []),
        ({"environment": {"cpu": {"model": "A"}, "variables": {"TF_CLUSTER_TOKEN": "b"}}}, []),
        ({"environment": {"cpu": {"model": "B"}}}, ["environment.cpu.model"]),
        ({"code": CODE | {"commit": "b"}}, []),  # the same code in another commit
        ({"code": CODE | {"commit": "b", "train_sha256": "3"}}, ["code.commit", "code.train_sha256"]),
    ],
)
def test_what_differs_between_the_machines_is_named(made, theirs, expected):
    ours = {"cluster": {"tasks": [{"port": 1}]}, "code": CODE}
    compared = rerun.compare_repeated(made("one", **ours), made("two", sha256="bb", **ours | theirs))
    assert expected == [each.partition(":")[0] for each in compared.differences]


def test_a_run_that_went_on_without_a_task_says_so(made):
    first, second = made("one"), made("two", sha256="bb")
    first.begin_generation(1, task="worker-0", saved=120, left_out=["worker-0"])
    first.begin_generation(2, task="worker-0", saved=300)
    assert [
        "tasks: one continued without worker-0 from step 120",
        "tasks: one continued with worker-0 again from step 300",
    ] == rerun.compare_repeated(first, second).differences


def test_only_a_run_that_succeeded_can_be_made_again(made, make_run):
    failed, scripted = made("failed"), made("scripted")
    write_json(failed.summary, {"state": "failed"})
    write_json(scripted.config, {"script": "train.py"})
    for run, why in ((make_run("new", workers=0), "in progress"), (failed, "failed"), (scripted, "losses")):
        with pytest.raises(UsageError, match=why):
            rerun.repeat_run(run, "", lambda command: pytest.fail("something was started"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rerun_that_is_interrupted_or_terminated_has_stopped(made, make_run, monkeypatch, number):
    first, second = made("one"), make_run("two", workers=0)
    monkeypatch.setattr(planning, "plan", lambda requested: SimpleNamespace(run=second))
    monkeypatch.setattr(startup, "start", lambda *_, **__: None)
    monkeypatch.setattr(foreground, "follow", lambda *_: signal.getsignal(number)(number, None))
    with pytest.raises(KeyboardInterrupt):
        rerun.repeat_run(first, "", lambda command: pytest.fail("local processes need no command"))
    assert "stopped" == read_json(second.summary)["state"]
