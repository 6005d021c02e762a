"""Real faults on real runs: every run must continue, and a synchronous one end with the bits of an undisturbed one."""

import os
import secrets
from dataclasses import replace

import pytest

from benchmarks.campaign.cases import CASES
from cluster.contract.run.folder import RunFolder
from cluster.host.control import chaos
from cluster.host.control.chaos import Fault
from cluster.host.runtime import supervisor
from tests.e2e.scenario import ENDLESS, SLOW_MACHINE_S, Clusters, summary
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("data")

EARLY_S = 10.0
"""A dead process is noticed by its end, on a busy machine, too, and not by the silence that a hang is noticed by."""
TRAINING = ("--log-every=5", "--steps-per-loop=5", "--evaluate-every=100000")


def start(
    clusters: Clusters, name: str, *words: str, length: tuple[str, ...] = ENDLESS, runtime: str = "local"
) -> RunFolder:
    words = (*words, "--detach", "--", *length)
    return clusters.up(name, *words, runtime=runtime, training=TRAINING, timeout_s=SLOW_MACHINE_S)


def calm(clusters: Clusters, *words: str, length: tuple[str, ...]) -> RunFolder:
    """Train undisturbed for so many steps."""
    run = start(clusters, "calm", *words, "--fresh", length=length)
    clusters.invoke("wait", "calm", timeout_s=SLOW_MACHINE_S)
    return run


@pytest.mark.alone
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.runtime == "local"])
def test_faults_in_any_phase_must_lose_no_run_and_change_no_bit(clusters, case):
    """STORM_SEED repeats the faults of a failure."""
    seed = int(os.environ.get("STORM_SEED") or secrets.randbits(31))
    words = ("--faults=1", f"--case={case}", f"--seed={seed}")
    print(Clusters(clusters.runs_dir, module="benchmarks.campaign").invoke(*words, timeout_s=SLOW_MACHINE_S))


@pytest.mark.alone
@pytest.mark.docker
@pytest.mark.usefixtures("require_engine", "images")
def test_containers_must_outlive_what_only_an_engine_can_do(clusters):
    words = ("--workers=1", "--checkpoint-every=20")
    run = start(clusters, "contained", *words, runtime="docker")
    whole = Fault("kill", "worker-0", whole=True)
    others = [Fault("oom", "chief"), *(Fault(kind, "worker-0") for kind in ("pause", "partition", "slow"))]
    for fault in (whole, *others):
        # Some steps apart: three failures at one step would end the run.
        result = chaos.inject(run, replace(fault, at_step=run.newest_step + 30), SLOW_MACHINE_S)
        assert result.ended is None, result
        assert (fault.kind == "slow") is (result.detected_s is None), result
        if fault.kind == "partition":
            causes = [event.detail["cause"] for event in run.events() if event.event == "gang restart"]
            assert {"chief", "worker-0"} <= set(causes[-1].split())
    clusters.check_bits(run, *words, training=TRAINING)


@pytest.mark.alone
def test_a_full_disk_must_end_the_run_and_lose_no_good_checkpoint(small):
    run = start(small, "full", "--workers=1", "--checkpoint-every=50")
    wait_for((run.checkpoints / "ckpt-50.index").exists, "the first checkpoint", SLOW_MACHINE_S)
    assert "the run failed" in small.invoke("chaos", "diskfull", "chief")
    assert "the disk is full" in summary(run)["cause"]["error"]
    assert not (small.runs_dir / ".ballast").exists()
    wait_for(lambda: not supervisor.processes_left(run), "the end of all that was started", SLOW_MACHINE_S)
    steps = run.saved_steps[-1] + 50
    small.invoke("up", "--resume=full", "--runtime=local", "--tensorboard-port=0", "--", f"--max-steps={steps}")
    assert ("succeeded", steps) == (summary(run)["state"], summary(run)["steps"])
    assert 50 <= next(event.step for event in run.events() if event.event == "restored")
