"""A run that loses tasks and checkpoints ends with the weights of an undisturbed run, bit for bit."""

import os

import pytest

from cluster.host.control import chaos
from cluster.host.control.chaos import Fault
from cluster.system.json_files import read_json_lines
from tests.e2e.scenario import SLOW_MACHINE_S, summary
from tests.e2e.test_storms import EARLY_S, calm, start

pytestmark = pytest.mark.usefixtures("data")


def test_kills_a_bad_checkpoint_and_a_stop_must_not_change_a_bit(clusters):
    words, length = ("--workers=1", "--checkpoint-every=10"), ("--max-steps=100",)
    undisturbed = calm(clusters, *words, length=length)
    with pytest.MonkeyPatch.context() as patch:  # the first kill comes before the usual ten seconds of training
        patch.setitem(clusters.environment, "STANDBY_DELAY_S", "1")
        run = start(clusters, "stormy", *words, length=length)
    # From this process, as the run would do many steps while a command starts.
    killed = chaos.inject(run, Fault("kill", "worker-0", at_step=20, whole=True))
    assert killed.ended is None
    assert killed.detected_s is not None
    assert killed.detected_s < EARLY_S
    assert killed.steps_lost in range(11)
    damaged = chaos.inject(run, Fault("corrupt", "chief", at_step=40))
    assert damaged.steps_lost in range(11)  # the tasks continue from memory
    assert "stopped" == chaos.inject(run, Fault("stop", "worker-0", at_step=50)).ended
    assert "stopped" == summary(run)["state"]
    damage = max(run.checkpoints.glob("ckpt-*.data-*"), key=lambda path: path.stat().st_mtime)
    os.truncate(damage, damage.stat().st_size - 1)
    output = clusters.invoke("up", "--resume=stormy", "--runtime=local", "--tensorboard-port=0")
    assert "is damaged" in run.log("chief").read_text()
    assert summary(undisturbed)["weights_sha256"] == summary(run)["weights_sha256"]
    assert "the same bits as the undisturbed run calm" in output
    assert ["kill", "corrupt", "stop"] == [fault["kind"] for fault in read_json_lines(run.path / "chaos.jsonl")]


@pytest.mark.alone
def test_a_storm_of_twenty_faults_must_not_change_a_bit(clusters):
    words, length = ("--workers=2", "--checkpoint-every=20"), ("--epochs=10", "--max-steps=1200")
    undisturbed = calm(clusters, *words, length=length)
    run = start(clusters, "storm", *words, length=length)
    output = clusters.invoke("chaos", "storm", "--faults=20", "--seed=7", timeout_s=2 * SLOW_MACHINE_S)
    assert 20 == output.count(" at step "), output
    assert "succeeded" == summary(run)["state"]
    assert summary(undisturbed)["weights_sha256"] == summary(run)["weights_sha256"]
    assert "the same bits as the undisturbed run calm" in output
