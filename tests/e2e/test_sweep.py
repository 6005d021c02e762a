"""A sweep that is killed continues where it was, and successive halving stops the trial that learns nothing."""

import pytest

from cluster.system.json_files import read_json
from tests.e2e.scenario import SLOW_MACHINE_S, TRAINING, step_of, summary
from tests.support.waiting import wait_for


@pytest.mark.long  # without a cluster: `tests/unit/host/test_sweep.py`
def test_a_killed_sweep_continues_and_stops_the_worst_trial(clusters):
    options = ("--name=rates", "--runtime=local", "--workers=0", "--halving=20")
    over = "--over=optimizer.learning-rate=3e-3,1e-9"
    first = clusters.popen("sweep", *options, over, "--", *TRAINING, "--max-steps=400", "--epochs=10")
    good, bad = clusters.run("rates-1"), clusters.run("rates-2")
    wait_for(lambda: step_of(good) > 0, SLOW_MACHINE_S)
    first.kill()
    first.communicate()
    shown = clusters.invoke("sweep", "--resume=rates", timeout_s=SLOW_MACHINE_S).splitlines()
    assert ("succeeded", 400, 0) == (summary(good)["state"], summary(good)["steps"], len(good.generations()) - 1)
    assert "stopped" == summary(bad)["state"]
    assert summary(bad)["steps"] < 400
    assert {"rates-2": 20} == read_json(clusters.runs_dir / ".sweeps" / "rates" / "sweep.json")["dropped"]
    table = shown[next(at for at, line in enumerate(shown) if line.startswith("RUN ")) + 1 :]
    assert ["rates-1", "rates-2"] == [line.split()[0] for line in table[:2]]
    assert "2 done before" in clusters.invoke("sweep", "--resume=rates")
