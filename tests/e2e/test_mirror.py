"""A run whose folder is lost continues from its mirror."""

import dataclasses
import shutil

import pytest

from tests.e2e.scenario import STEPS, summary

pytestmark = pytest.mark.usefixtures("data")


@pytest.mark.extended
def test_a_run_must_continue_from_its_mirror_alone(clusters, tmp_path):
    url = f"file://{tmp_path}/store"
    undisturbed = clusters.up("undisturbed", "--workers=0")
    run = clusters.up("mirrored", f"--workers=0 --mirror={url} -- --max-steps {STEPS // 2}")
    assert f"checkpoint of step {STEPS // 2} and the export" in clusters.invoke("status", run.name)
    shutil.rmtree(run.path)
    another_machine = dataclasses.replace(
        clusters, environment=clusters.environment | {"XDG_STATE_HOME": str(tmp_path / "state")}
    )
    options = ("--runtime=local", "--tensorboard-port=0", "--", "--max-steps", str(STEPS))
    another_machine.invoke("up", f"--resume={url}/{run.name}", *options)
    assert STEPS // 2 == next(event.step for event in run.events() if event.event == "restored")
    assert summary(undisturbed)["weights_sha256"] == summary(run)["weights_sha256"]
