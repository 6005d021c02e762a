"""`invoke scale`: a run goes on with other workers, and its loss curve as if nothing had happened."""

from pathlib import Path

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host.runtime import supervisor
from cluster.system.json_files import read_json, read_json_lines
from tests.e2e.scenario import TRAINING, Clusters, losses, step_of, summary
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("data")

STEPS = 200
LONGER = ("--max-steps", str(STEPS), "--global-batch", "192")
COMPARED = 10
"""Steps after a change of size that must agree with the undisturbed run's: sums of other replicas round differently,
and training multiplies the difference, up to a thousandfold in 20 steps."""


def begin(clusters: Clusters, name: str, *options: str, runtime: str = "local") -> RunFolder:
    """Bring up a cluster in the background, and let it do some steps."""
    words = ("up", f"--name={name}", f"--runtime={runtime}", "--tensorboard-port=0", "--detach", *options)
    clusters.invoke(*words, "--", *TRAINING, *LONGER, timeout_s=400)
    run = clusters.run(name)
    wait_for(lambda: step_of(run) >= 6, "step 6")
    return run


def scale(clusters: Clusters, run: RunFolder, *options: str) -> int:
    """Scale a run; return the step at which it was."""
    output = clusters.invoke("scale", *options)
    event = [event for event in run.events() if event.event == "scaled"][-1]
    assert f" at step {event.step}; every task trains again after " in output, output
    beats = run.heartbeats()
    assert {task.name for task in run.load_cluster().tasks} == set(beats)
    return event.step


def check_curve(run: RunFolder, undisturbed: RunFolder, scaled_at: int) -> None:
    """Check that every step was logged once, and that the losses are those of the undisturbed run."""
    logged = [row["step"] for row in read_json_lines(run.metrics("chief")) if "loss" in row]
    steps = summary(run)["steps"]
    assert list(range(1, steps + 1)) == logged
    assert 6 <= scaled_at <= steps - COMPARED
    expected, found = losses(undisturbed), losses(run)
    assert [expected[step] for step in range(1, scaled_at + 1)] == [found[step] for step in range(1, scaled_at + 1)]
    apart = {step: abs(found[step] / expected[step] - 1) for step in range(scaled_at + 1, scaled_at + COMPARED + 1)}
    assert max(apart.values()) <= 1e-3, apart


@pytest.fixture(scope="module")
def undisturbed(clusters) -> RunFolder:
    """Chief and two workers, whose size stays."""
    return clusters.up("undisturbed", f"--workers=2 -- {' '.join(LONGER)}")


@pytest.mark.long
def test_more_workers_must_go_on_with_the_same_curve_in_the_foreground(clusters):
    alone = clusters.up("alone", f"--workers=0 -- {' '.join(LONGER)}")
    words = ("up", "--name=more", "--runtime=local", "--tensorboard-port=0", "--workers=0", "--", *TRAINING, *LONGER)
    shown = clusters.popen(*words)
    run = clusters.run("more")
    wait_for(lambda: run.path.exists() and step_of(run) >= 6, "step 6")
    scaled_at = scale(clusters, run, "--workers=2", "--run=more")
    output, _ = shown.communicate(timeout=240)
    assert 0 == shown.returncode, output
    assert "\nsucceeded: " in output
    check_curve(run, alone, scaled_at)
    ended = summary(run)
    assert ("MultiWorkerMirroredStrategy", 3) == (ended["strategy"], ended["replicas"])


@pytest.mark.long
def test_parameter_server_must_be_scaled_with_its_evaluator(clusters):
    run = begin(clusters, "ps-more", "--workers=1", "--ps=1", "--evaluator")
    scaled_at = scale(clusters, run, "--workers=2", "--run=ps-more")
    again_at = scale(clusters, run, "--workers=1", "--ps=2", "--run=ps-more")
    clusters.invoke("wait", "--timeout=200", "ps-more")
    assert 6 <= scaled_at < again_at < STEPS
    assert list(range(1, STEPS + 1)) == list(losses(run))
    assert losses(run)[STEPS] < losses(run)[1]
    ended = summary(run)
    assert ("succeeded", "ParameterServerStrategy", 1) == tuple(ended[k] for k in ("state", "strategy", "replicas"))
    assert {"chief": 0, "worker-0": 0, "ps-0": 0, "ps-1": 0, "evaluator": 0} == ended["tasks"]


@pytest.mark.long
def test_a_scaler_that_dies_must_leave_a_run_that_can_go_on(clusters, undisturbed):
    run = begin(clusters, "orphan", "--workers=2")
    assert run.request_stop("a scaler that died", then="scale")
    wait_for(lambda: not supervisor.processes_left(run), "the end of all processes")
    assert not run.summary.exists()
    clusters.invoke("stop", "orphan")
    assert "stopped" == summary(run)["state"]
    clusters.invoke("up", "--resume=orphan", "--workers=1", "--runtime=local", "--tensorboard-port=0")
    check_curve(run, undisturbed, next(e.step for e in run.events() if e.event == "restored"))


@pytest.mark.long
@pytest.mark.docker
@pytest.mark.usefixtures("require_engine", "images")
def test_containers_must_be_scaled(clusters, undisturbed):
    run = begin(clusters, "contained", "--workers=2", runtime="docker")
    waits = clusters.popen("wait", "contained")
    scaled_at = scale(clusters, run, "--workers=1", "--run=contained")
    assert "docker" == read_json(run.control / "started.json")["runtime"]
    output, _ = waits.communicate(timeout=240)
    assert 0 == waits.returncode, output
    check_curve(run, undisturbed, scaled_at)
    assert {"chief": 0, "worker-0": 0} == summary(run)["tasks"]
    assert ["chief", "worker-0"] == list(read_json(Path(run.compose))["services"])
