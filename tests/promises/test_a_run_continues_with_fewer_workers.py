"""Elastic runs: a worker that stays away is left out, and the weights are those of an undisturbed run."""

import time
from typing import Any

import pytest

from cluster.contract.run import membership
from cluster.contract.run.folder import RunFolder
from cluster.host.control import chaos
from cluster.host.control.chaos import Fault
from cluster.host.launch import planning, startup
from cluster.host.options.request import Request
from cluster.host.runtime import supervisor, warm
from tests.e2e.scenario import DATA, ENDLESS, SLOW_MACHINE_S, TRAINING, Clusters, await_members, summary

pytestmark = pytest.mark.usefixtures("data")

AWAY_S = "5"
"""Seconds that a task may be away: one would suffice on an idle machine."""
ELASTIC = ("--workers=2", "--min-workers=1", "--bitwise-elastic=4")


@pytest.fixture(autouse=True)
def patience(clusters, monkeypatch):
    monkeypatch.setitem(clusters.environment, "RENDEZVOUS_TIMEOUT_S", AWAY_S)
    monkeypatch.setenv("RENDEZVOUS_TIMEOUT_S", AWAY_S)


def begin(clusters: Clusters, name: str, *words: str, runtime: str = "local") -> RunFolder:
    """Bring up a cluster in the background."""
    words = (*words, "--detach", "--checkpoint-every=10", "--", *ENDLESS)
    return clusters.up(name, *words, runtime=runtime, timeout_s=SLOW_MACHINE_S)


def test_a_worker_that_never_comes_must_not_keep_the_run_or_change_a_bit(clusters, monkeypatch):
    start = supervisor.start_supervisor

    def start_without(run: RunFolder, *early: warm.EarlySupervisor) -> None:
        run.away("worker-0").parent.mkdir()
        run.away("worker-0").touch()
        start(run, *early)

    monkeypatch.setenv("RUNS_DIR", str(clusters.runs_dir))
    monkeypatch.setenv("DATA_DIR", str(DATA))
    monkeypatch.setattr(supervisor, "start_supervisor", start_without)
    size: dict[str, Any] = {"workers": 2, "min_workers": 1, "bitwise_elastic": 4}
    request = Request(name="short", runtime="local", tensorboard_port="0", overrides=TRAINING, **size)
    startup.start(planning.plan(request), print, began=time.time())
    assert "without worker-0 from step 0" in clusters.invoke("wait", "short", timeout_s=SLOW_MACHINE_S)
    ended = summary(clusters.run("short"))
    assert ("succeeded", 2) == (ended["state"], ended["replicas"])
    assert {"chief": 0, "worker-0": None, "worker-1": 0} == ended["tasks"]
    alone = clusters.up("alone", "--workers=0 --bitwise-elastic=4")
    assert summary(alone)["weights_sha256"] == ended["weights_sha256"]


@pytest.mark.long
def test_a_lost_worker_that_returns_must_be_taken_in(clusters):
    run = begin(clusters, "grows", *ELASTIC, "--grow")
    assert chaos.inject(run, Fault("lose", "worker-1", at_step=20), SLOW_MACHINE_S).ended is None
    await_members(run)
    assert [["worker-1"], []] == [list(change.left_out) for change in membership.changes(run)]
    clusters.check_bits(run, "--workers=2", "--bitwise-elastic=4")


@pytest.mark.alone
def test_a_storm_with_lost_workers_must_lose_no_run_and_change_no_bit(clusters):
    run = begin(clusters, "stormy", *ELASTIC, "--grow")
    kinds = ["lose", "kill", "lose", "corrupt"]
    assert [None] * 8 == [result.ended for result in chaos.inject_all(run, 8, 5, kinds, SLOW_MACHINE_S)]
    assert [change for change in membership.changes(run) if change.lost]
    clusters.check_bits(run, "--workers=2", "--bitwise-elastic=4")


@pytest.mark.long
@pytest.mark.docker
@pytest.mark.usefixtures("require_engine", "images")
def test_a_container_that_is_lost_must_be_taken_in_again(clusters):
    run = begin(clusters, "contained", *ELASTIC, "--grow", runtime="docker")
    assert chaos.inject(run, Fault("lose", "worker-1", at_step=20), SLOW_MACHINE_S).ended is None
    await_members(run)
    clusters.check_bits(run, "--workers=2", "--bitwise-elastic=4")
