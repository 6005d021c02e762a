"""A run made once more is compared step by step and bit by bit, and what differs between the machines is named."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host.checks import rerun
from cluster.host.control import watch
from cluster.host.launch import planning, startup
from cluster.system.errors import UsageError
from cluster.system.json_files import append_json, read_json, write_json

LOSSES = {1: 2.3, 2: 2.2, 3: 2.0}


@pytest.fixture
def made(make_run) -> Callable[..., RunFolder]:
    """Makes a run that succeeded."""

    def make(name: str, losses: dict[int, float] | None = None, sha256: str = "aa", **manifest: Any) -> RunFolder:
        run = make_run(name, workers=0)
        for step, loss in (losses or LOSSES).items():
            append_json(run.metrics("chief"), {"step": step, "loss": loss})
        append_json(run.metrics("chief"), {"step": 3, "eval_loss": 1.0})
        write_json(run.summary, {"state": "succeeded", "weights_sha256": sha256})
        write_json(run.manifest, {"run": name, "runtime": "local", "environment": {"cpu": {"model": "A"}}} | manifest)
        return run

    return make


def test_the_same_losses_and_weights_are_identical(made):
    verdict = rerun.compare(made("one"), made("two", environment={"cpu": {"model": "B"}}), 0.0)
    assert ("identical", 3, [], 0) == (
        verdict.verdict,
        verdict.steps_compared,
        verdict.differences,
        rerun.exit_code(verdict),
    )
    assert ["identical: the losses of 3 logged steps and the final weights are the same bits"] == verdict.lines


@pytest.mark.parametrize(("tolerance", "expected", "code"), [(0.0, "different", 1), (0.2, "within tolerance", 0)])
def test_how_far_apart_and_from_which_step_is_reported(made, tolerance, expected, code):
    second = made("two", {1: 2.3, 2: 2.2 * 1.01, 3: 1.8}, "bb", environment={"cpu": {"model": "B"}})
    verdict = rerun.compare(made("one"), second, tolerance)
    assert (expected, 2, code) == (verdict.verdict, verdict.from_step, rerun.exit_code(verdict))
    assert [
        f"{expected}: the losses differ by up to 1.0e-01 (relative), from step 2 on over 3 logged steps; "
        "the final weights differ",
        "differs: environment.cpu.model: A there, B here",
    ] == verdict.lines


def test_other_weights_after_the_same_losses_are_not_identical(made):
    verdict = rerun.compare(made("one"), made("two", sha256="bb"), 0.0)
    assert ("different", None, False) == (verdict.verdict, verdict.from_step, verdict.same_weights)
    assert ["different: the losses are the same over 3 logged steps; the final weights differ"] == verdict.lines
    assert "within tolerance" == rerun.compare(made("three"), made("four", sha256="bb"), 1e-9).verdict


def test_a_step_that_one_of_them_lacks_is_a_difference(made):
    assert "different" == rerun.compare(made("one"), made("two", {1: 2.3, 2: 2.2}), 1.0).verdict


def test_a_run_that_went_on_without_a_task_says_so(made):
    first, second = made("one"), made("two", sha256="bb")
    first.begin_generation(1, task="worker-0", saved=120, left_out=["worker-0"])
    first.begin_generation(2, task="worker-0", saved=300)
    differences = rerun.compare(first, second, 0.0).differences
    assert [
        "tasks: one continued without worker-0 from step 120",
        "tasks: one continued with worker-0 again from step 300",
    ] == differences


def test_ports_and_names_do_not_count_as_differences(made):
    one = made("one", cluster={"strategy": "one", "tasks": [{"port": 1}]})
    two = made("two", sha256="bb", cluster={"strategy": "one", "tasks": [{"port": 2}]})
    assert [] == rerun.compare(one, two, 0.0).differences


def test_another_commit_with_the_same_code_is_no_difference(made):
    code = {"commit": "a", "changes_sha256": None, "cluster_sha256": "1", "train_sha256": "2"}
    first, documented = made("one", code=code), made("two", sha256="bb", code=code | {"commit": "b"})
    assert [] == rerun.compare(first, documented, 0.0).differences
    changed = made("three", sha256="bb", code=code | {"commit": "b", "train_sha256": "3"})
    found = rerun.compare(first, changed, 0.0).differences
    assert ["code.commit", "code.train_sha256"] == [each.partition(":")[0] for each in found]


def test_only_a_run_that_succeeded_can_be_made_again(made, make_run):
    def refused(run: RunFolder) -> str:
        with pytest.raises(UsageError) as error:
            rerun.rerun(run, "", 0.0, lambda command: pytest.fail("something was started"))
        return str(error.value)

    assert "is in progress: expected one that succeeded" in refused(make_run("new", workers=0))
    failed = made("failed")
    write_json(failed.summary, {"state": "failed"})
    assert "is failed: expected one that succeeded" in refused(failed)
    old = made("old")
    old.manifest.unlink()
    assert "has no manifest.json" in refused(old)
    scripted = made("scripted")
    write_json(scripted.config, {"script": "train.py"})
    assert "reports no losses" in refused(scripted)


def test_a_rerun_that_is_interrupted_has_stopped(made, make_run, monkeypatch):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    first, second = made("one"), make_run("two", workers=0)
    monkeypatch.setattr(planning, "plan", lambda requested: SimpleNamespace(run=second))
    monkeypatch.setattr(startup, "start", lambda *_, **__: None)
    monkeypatch.setattr(watch, "follow", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rerun.rerun(first, "", 0.0, lambda command: pytest.fail("local processes need no command"))
    assert "stopped" == read_json(second.summary)["state"]


@pytest.mark.parametrize("text", ["much", "-1", "nan", "inf", ""])
def test_a_tolerance_is_a_number(text):
    with pytest.raises(UsageError, match="expected a number from 0, such as 1e-6"):
        rerun.parse_tolerance(text)
