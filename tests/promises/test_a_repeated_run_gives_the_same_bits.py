"""A repeated run ends with the same bits, in containers or processes, and on any number of tasks."""

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import read_json
from tests.e2e.scenario import ENDLESS, STEPS, step_of, summary
from tests.promises.test_containers_are_locked_down import containers
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("data")

ELASTIC = "--bitwise-elastic=4"


@pytest.mark.extended
def test_a_run_scaled_to_as_many_tasks_as_shards_must_give_the_bits_of_one(clusters):
    """The 4 shards run on 3 tasks, one of which has two; then on 2 tasks, and on 4."""
    run = clusters.up("scaled", f"--workers=2 {ELASTIC} --detach", "--", *ENDLESS)
    for size in (1, 3, None):
        began = step_of(run)
        wait_for(lambda began=began: step_of(run) > began + 5, "some steps")
        if size is not None:
            clusters.invoke("scale", "--run=scaled", f"--workers={size}")
    clusters.check_bits(run, "--workers=0", ELASTIC)
    assert 2 == len([event for event in run.events() if event.event == "scaled"])
    assert run.losses() == clusters.run("calm-scaled").losses()


# The same topology again


@pytest.fixture(scope="module")
def three(clusters) -> RunFolder:
    """Chief and two workers, as local processes, undisturbed."""
    return clusters.up("three")


@pytest.mark.long  # in containers each time
def test_the_same_seed_must_give_the_same_bits_again(clusters, three):
    output, again = clusters.rerun(three.name)
    assert f"identical: the losses of {STEPS} logged steps and the final weights are the same bits" in output
    assert summary(three)["weights_sha256"] == summary(again)["weights_sha256"]
    assert three.losses() == again.losses()


@pytest.mark.docker
@pytest.mark.usefixtures("require_engine", "images")
def test_containers_must_give_the_same_bits_as_processes(clusters, three):
    output, contained = clusters.rerun(three.name, "--runtime=docker")
    assert f"identical: the losses of {STEPS} logged steps and the final weights are the same bits" in output
    assert ("succeeded", STEPS) == (summary(contained)["state"], summary(contained)["steps"])
    assert "docker" == read_json(contained.manifest)["runtime"]
    assert read_json(contained.manifest)["image"]["id"].startswith("sha256:")
    assert summary(three)["weights_sha256"] == summary(contained)["weights_sha256"]
    assert three.losses() == contained.losses()
    assert {} == containers(contained)
