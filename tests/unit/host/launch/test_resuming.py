"""A run that is there already: left alone, resumed, or deleted where requested; and what it may not change."""

from collections.abc import Callable
from typing import Any

import pytest

from cluster.contract import spec
from cluster.contract.run import provenance
from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import Role
from cluster.host.launch import metrics_server, planning
from cluster.host.launch.resuming import check_resumed
from cluster.host.options.request import Request
from cluster.system.errors import EXIT_USAGE, UsageError
from cluster.system.json_files import append_json, read_json, write_json
from tests.support.beats import beat
from tests.support.launching import refusal
from train.config import TrainConfig


def test_an_unknown_run_is_refused_with_the_nearest(resolved, make_run):
    make_run("monday")
    assert "'monday'" in str(refusal(Request(resume="mondey")))
    assert "--resume monday" in str(refusal(Request(name="monday", runtime="local")))


@pytest.mark.parametrize("requested", [{"resume": "run"}, {"name": "run", "fresh": True}])
def test_a_run_in_progress_is_left_alone(resolved, make_run, requested):
    beat(make_run(workers=1), "chief", "training")
    error = refusal(Request(**requested))
    assert (EXIT_USAGE, True) == (error.exit_code, "in progress" in str(error))


@pytest.mark.usefixtures("hurried")
def test_a_run_whose_tasks_all_fell_silent_can_be_resumed(resolved, make_run):
    run = make_run(workers=1)
    beat(run, "chief", "training", age_s=60)
    beat(run, "worker-0", "done", age_s=60)  # it had ended; the chief and the supervisor were killed
    assert planning.plan(Request(resume="run", runtime="local")).resumes


@pytest.mark.parametrize(
    ("previous", "requested", "expected"),
    [
        ({"workers": 1}, {}, ("multiworker", 1, 0, 1)),
        ({"workers": 3, "ps": 2, "devices": 2, "evaluator": True}, {}, ("ps", 3, 2, 2)),
        ({"workers": 0, "devices": 2, "strategy": "central"}, {}, ("central", 0, 0, 2)),
        ({"workers": 0, "devices": 2, "strategy": "central"}, {"devices": 4}, ("central", 0, 0, 4)),
        ({"workers": 0, "devices": 2}, {"devices": 1}, ("one", 0, 0, 1)),
        ({"workers": 2}, {"ps": 1}, ("ps", 2, 1, 1)),
        ({"workers": 2, "ps": 1}, {"workers": 0}, ("one", 0, 0, 1)),
        ({"workers": 2, "ps": 1}, {"ps": 0}, ("multiworker", 2, 0, 1)),
        ({"workers": 2, "ps": 1}, {"strategy": "multiworker"}, ("multiworker", 2, 0, 1)),
        ({"workers": 2}, {"strategy": "one"}, ("one", 0, 0, 1)),
        ({"workers": 0}, {"strategy": "multiworker"}, ("multiworker", 2, 0, 1)),
    ],
)
def test_a_resumed_run_keeps_its_topology_unless_another_is_given(resolved, stopped_run, previous, requested, expected):
    cluster = planning.plan(Request(resume=stopped_run(**previous).name, runtime="local", **requested)).cluster
    counts = tuple(len(cluster.of(role)) for role in (Role.WORKER, Role.PS))
    assert expected == (cluster.strategy, *counts, cluster.devices)
    assert previous.get("evaluator", False) is bool(cluster.of(Role.EVALUATOR))


@pytest.mark.parametrize(
    ("option", "began", "given"),
    [("max_restarts", 0, 5), ("max_external_restarts", 7, 9), ("hang_timeout", 600, 30), ("metrics_port", 32767, 0)],
)
def test_a_resumed_run_keeps_an_option_unless_it_is_given(resolved, stopped_run, monkeypatch, option, began, given):
    monkeypatch.setattr(metrics_server, "check_port", lambda port: None)
    monkeypatch.setattr(metrics_server, "start", lambda *_: None)
    stopped_run(name="one", **{option: began})
    for requested, expected in (({}, began), ({option: given}, given)):
        assert expected == planning.plan(Request(resume="one", runtime="local", **requested)).options.count(option)


@pytest.fixture
def trained(make_run) -> Callable[..., RunFolder]:
    """Makes a run that has saved at step 600 of 938, in epoch 1.92, with these settings and topology."""

    def make(steps: int = 600, topology: dict[str, Any] | None = None, **config: Any) -> RunFolder:
        run = make_run("demo", **(topology or {"workers": 2}))
        write_json(run.config, {**TrainConfig().to_json(), **config})
        append_json(run.metrics("chief"), {"step": 10, "epoch": 0.032})
        if steps:
            write_json(run.checkpoints / f"ckpt-{steps}.json", {"step": steps, "files": {}})
        return run

    return make


def notes(run: RunFolder, preset: str = "", topology: dict[str, Any] | None = None, **config: Any) -> list[str]:
    changed = {**read_json(run.config), **config}
    return check_resumed(run, preset, changed, spec.build(**topology) if topology else run.load_cluster())


OPTIMIZER = TrainConfig().to_json()["optimizer"]
SERVERS = {"workers": 2, "ps": 1}


@pytest.mark.parametrize(
    ("made", "changes", "named"),
    [
        # Its steps or its checkpoint depend on these.
        ({}, {"global_batch": 384}, "--global-batch 384"),
        ({}, {"seed": 7}, "--seed 7"),
        ({}, {"dataset": "mnist"}, "--dataset mnist"),
        ({}, {"source": "stream"}, "--source stream"),
        ({}, {"model": "resnet50"}, "--model resnet50"),
        ({}, {"preset": "mnist"}, "--preset mnist"),
        ({}, {"optimizer": OPTIMIZER | {"name": "sgd"}}, "--optimizer.name sgd"),
        ({}, {"optimizer": OPTIMIZER | {"ema": 0.9}}, "--optimizer.ema 0.9"),
        ({"loop": "fit", "topology": SERVERS}, {"loop": "fit", "callbacks": "tutorial"}, "--callbacks tutorial"),
        # One Keras does not read the other's checkpoints.
        ({"loop": "custom", "topology": SERVERS}, {"loop": "fit"}, "Keras"),
        ({"loop": "fit", "topology": SERVERS}, {"loop": "custom"}, "Keras"),
        ({"loop": "fit", "topology": {"workers": 0}}, {"topology": SERVERS}, "Keras"),
        # It cannot do less than it has done.
        ({}, {"max_steps": 599}, "done"),
        ({}, {"epochs": 1.9}, "done"),
        ({}, {"epochs": 1.0, "max_steps": 900}, "done"),
    ],
)
def test_what_its_steps_or_its_checkpoint_depend_on_stays(trained, made, changes, named):
    with pytest.raises(UsageError, match=named) as refused:
        notes(trained(**made), **changes)
    assert 1 == len(str(refused.value).splitlines())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": OPTIMIZER | {"learning_rate": 1e-4, "schedule": "cosine"}},
        *({"loop": "fit"}, {"epochs": 2.0}, {"max_steps": 601}, {"checkpoint_every": 50}, {"precision": "bf16"}),
        *({"bitwise_elastic": 6}, {"topology": {"workers": 5}}, {"topology": SERVERS}),
    ],
)
def test_everything_else_may_change_and_anything_before_a_checkpoint(trained, changes):
    assert [] == notes(trained(steps=0), seed=7, global_batch=384, model="resnet50", max_steps=1)
    assert [] == notes(trained(), **changes)


@pytest.mark.parametrize(
    ("previous", "changes", "limit"),
    [
        ({"max_steps": 600}, {}, "--max-steps"),
        ({"max_steps": 600}, {"epochs": 6.0}, "--max-steps"),
        ({"epochs": 1.92}, {}, "--epochs"),
        ({"epochs": 1.919}, {}, "--epochs"),  # the last step runs into the next epoch
    ],
)
def test_a_run_that_has_nothing_left_to_do_says_so(trained, previous, changes, limit):
    (note,) = notes(trained(**previous), **changes)
    assert limit in note


@pytest.mark.slow
@pytest.mark.usefixtures("hurried")
def test_a_plan_checks_it_and_starts_nothing(trained):
    run = trained()
    write_json(run.summary, {"state": "stopped"})
    provenance.write_note(run)
    for overrides in (("--global-batch", "384"), ("--seed=7",)):
        with pytest.raises(UsageError):
            planning.plan(Request(resume="demo", runtime="local", overrides=overrides))
    planned = planning.plan(Request(resume="demo", runtime="local", overrides=("--max-steps", "600")))
    assert planned.about_resuming
    assert planned.about_resuming[0] in planned.notes
