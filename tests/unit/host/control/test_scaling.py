"""`invoke scale`: refusals, the request to stop, and watchers."""

from collections.abc import Callable
from typing import Any

import pytest

from cluster.contract import spec
from cluster.contract.run import claim, heartbeat, provenance
from cluster.contract.run.folder import LOST_AFTER_S, RunFolder
from cluster.contract.run.records import AfterStop
from cluster.host.control import foreground, scaling
from cluster.host.launch import planning, startup
from cluster.host.reports import listing
from cluster.host.runtime import resources as limits
from cluster.host.view.status import read_status
from cluster.system import memory
from cluster.system.errors import EXIT_PREREQUISITE, EXIT_USAGE, ClusterError, UsageError
from cluster.system.json_files import read_json, write_json
from tests.support.beats import beat
from tests.support.launching import no_shell

pytestmark = pytest.mark.usefixtures("recorded_configuration")


@pytest.fixture
def training(make_run) -> Callable[..., RunFolder]:
    """Makes a run whose every task has just written a heartbeat; none of them is there."""

    def make(config: dict[str, Any] | None = None, **topology: Any) -> RunFolder:
        run = make_run(**topology)
        write_json(run.config, {"global_batch": 96, "loop": "custom"} | (config or {}))
        provenance.write_note(run)
        beats(run)
        return run

    return make


def beats(run: RunFolder, age_s: float = 0, state: str = "training") -> None:
    for task in run.load_cluster().tasks:
        beat(run, task.name, state, age_s=age_s, generation=run.generation, step=7)


@pytest.fixture
def orphaned(training) -> Callable[..., RunFolder]:
    """Makes a run whose every task ended to be scaled, without the command that would start it again."""

    def make(age_s: float = LOST_AFTER_S + 5) -> RunFolder:
        run = training(workers=1)
        beats(run, age_s=age_s, state="stopped")
        assert run.request_stop("invoke scale", then=AfterStop.SCALE)
        run.end("stopped", task="chief")
        return run

    return make


def refusal(run: RunFolder, workers: int | None, ps: int | None = None) -> ClusterError:
    """Return the error that scaling is refused with; nothing may have been changed."""
    before = run.compose.read_text(), run.cluster.read_text(), run.generation
    with pytest.raises(ClusterError) as refused:
        scaling.scale_run(run, no_shell, workers=workers, ps=ps)
    assert before == (run.compose.read_text(), run.cluster.read_text(), run.generation)
    assert 1 == len(str(refused.value).splitlines())
    return refused.value


@pytest.mark.parametrize(
    ("topology", "workers", "ps", "named"),
    [
        ({"workers": 2}, None, None, "--workers"),
        ({"workers": 2}, 0, 1, "--ps 1"),
        ({"workers": 2}, 2, None, "2 workers already"),
        ({"workers": 1, "ps": 1}, None, 1, "already"),
        ({"workers": 2}, 4, None, "use 1, 3 or 5 workers"),
        ({"workers": 0, "devices": 2}, 200, None, "use 15, 23 or 47 workers"),
        ({"workers": 0, "devices": 32}, 1, None, "use 2 "),
        ({"workers": 0, "devices": 64}, 1, None, "no other number"),
        ({"workers": 0, "strategy": "tpu"}, 1, None, "TPU"),
        ({"workers": 1, "strategy": "pipeline"}, 3, None, "--resume run --stages"),
        ({"workers": 2, "config": {"script": "/its/train.py"}}, 1, None, "invoke stop run"),
    ],
)
def test_a_size_that_the_run_cannot_have_is_refused(training, topology, workers, ps, named):
    run = training(**topology)
    error = refusal(run, workers, ps)
    assert (EXIT_USAGE, False) == (error.exit_code, run.stop_requested)
    assert named in str(error)


def test_virtual_shards_are_shared_by_any_number_of_workers_up_to_theirs(training):
    """96 examples in 6 shards: 4 workers, which could not share the batch evenly, can share these."""
    run = training({"bitwise_elastic": 6}, workers=2)
    assert "--bitwise-elastic 6: 7 replicas share 6 virtual shards" in str(refusal(run, 6))
    assert not run.stop_requested
    scaling._check_size(run, run.load_cluster(), spec.build(workers=4))


def test_memory_counts_the_tasks_that_end(training, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: limits.TASK_MEMORY_BYTES)
    run = training(workers=1)
    error = refusal(run, 3)
    assert (EXIT_PREREQUISITE, False) == (error.exit_code, run.stop_requested)
    assert "use at most 3 tasks" in str(error)
    startup.check_machine(scaling.plan_scaling(run, 2), ending=2)


def test_only_a_run_that_goes_on_is_scaled(training):
    run = training(workers=2)
    assert run.request_stop("somebody")
    assert "stopped already" in str(refusal(run, 1))
    assert ("somebody", "") == tuple(read_json(run.control / "stop.json")[key] for key in ("by", "then"))
    write_json(run.summary, {"state": "stopped"})
    assert "--resume run --workers 1" in str(refusal(run, 1))


def test_the_request_of_a_killed_command_is_taken_over(training):
    run = training(workers=2)
    assert run.request_stop("invoke scale", then=AfterStop.SCALE)
    run.end("stopped", task="chief")
    assert scaling.stop_for_scaling(run)


@pytest.mark.parametrize("age_s", [1.0, LOST_AFTER_S + 5])
def test_a_run_whose_scaling_was_killed_can_be_resumed_at_once(orphaned, monkeypatch, age_s):
    run = orphaned(age_s)
    resume = planning.Request(resume="run", runtime="local")
    with claim.hold_claim(run, "scaled"), monkeypatch.context() as patch:
        patch.setattr(claim, "_mine", set())  # by another process
        assert None is heartbeat.final_state(run)
        with pytest.raises(UsageError):
            planning.plan(resume)
    assert "stopped" == heartbeat.final_state(run) == read_status(run)["state"] == listing.describe_run(run)["result"]
    assert planning.plan(resume).resumes


def test_the_plan_keeps_what_was_not_asked_for(training):
    run = training(workers=2, ps=1, evaluator=True)
    planned = scaling.plan_scaling(run, 1)
    assert ("ps", "local", True) == (planned.cluster.strategy, planned.runtime.name, planned.resumes)
    assert ["chief", "worker-0", "ps-0", "evaluator"] == [task.name for task in planned.cluster.tasks]
    assert "OneDeviceStrategy" == scaling.plan_scaling(run, 0).cluster.strategy_class


@pytest.mark.usefixtures("hurried")
def test_watchers_are_patient_with_a_run_that_is_being_scaled(orphaned, monkeypatch):
    run = orphaned()
    looks: list[Any] = []

    def looked(value: Any) -> None:
        looks.append(value)
        if len(looks) > 2 * LOST_AFTER_S:
            raise KeyboardInterrupt

    with claim.hold_claim(run, "scaled"), monkeypatch.context() as patch:
        patch.setattr(claim, "_mine", set())  # by another process
        with pytest.raises(KeyboardInterrupt):
            foreground.follow(run, looked)
    assert (True, False) == (run.continues_elsewhere, run.summary.exists())


@pytest.mark.usefixtures("hurried")
def test_watchers_end_a_run_whose_scaling_was_given_up(orphaned):
    run = orphaned()
    ended = foreground.follow(run, lambda value: None, timeout_s=300)
    assert ("failed", 1) == (ended.state, foreground.exit_code(ended))
    assert "`invoke scale` ended before" in ended.cause.error
    assert planning.plan(planning.Request(resume="run", runtime="local")).resumes


@pytest.mark.usefixtures("hurried")
def test_a_stop_after_a_scaler_s_death_ends_the_run(orphaned):
    run = orphaned()
    assert "stopped" == foreground.stop(run, "invoke stop", timeout_s=10).state


def test_a_run_may_be_scaled_before_it_trains(training):
    run = training(workers=1)
    (run.path / "status" / "worker-0.json").unlink()
    smaller, seen = scaling.plan_scaling(run, 0).cluster.to_json(), []

    def shrink(value: dict[str, Any]) -> None:
        seen.append([beat["task"] for beat in value["tasks"]])
        write_json(run.cluster, smaller)

    assert foreground.until_training(run, shrink)
    assert ["chief"] == seen[-1]


def test_an_agent_s_sigterm_does_not_take_the_next_size_away(make_run):
    run = make_run()
    assert run.request_stop("invoke scale", then=AfterStop.SCALE)
    assert not run.request_stop("worker-0")
    assert run.after_stop == "scale"
    run.insist_on_stop("invoke stop")
    assert (True, False) == (run.stop_requested, run.after_stop == "scale")
    run.insist_on_stop("another")
    assert "invoke stop" == read_json(run.control / "stop.json")["by"]


def test_only_one_s_own_stop_is_withdrawn(make_run):
    run = make_run()
    run.request_stop("invoke scale", then=AfterStop.SCALE)
    run.withdraw_stop()
    assert (False, True, False) == (run.stop_requested, run.stop_withdrawn(0), run.stop_withdrawn(1))
    run.request_stop("invoke stop")
    run.withdraw_stop()
    assert (True, False) == (run.stop_requested, run.stop_withdrawn(0))
