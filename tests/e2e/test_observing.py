"""What is seen of a run from outside while it trains: no port, its metrics, and a profile, which changes no bit."""

import urllib.error
from pathlib import Path

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host.runtime import namespaces
from cluster.system.json_files import read_json
from cluster.system.ports import free_ports
from tests.e2e.scenario import ENDLESS, step_of, summary
from tests.support import doors
from tests.support.exposition import scrape
from tests.support.waiting import wait_for

FEWEST_STEPS = 40
"""Enough to have an undisturbed step timed."""
LISTENS = "0A"
"""How /proc writes that state of a socket."""
ANYWHERE = {"0" * 8, "0" * 32}

Door = tuple[str, int]


@pytest.fixture(scope="module")
def training(clusters) -> RunFolder:
    """A run that trains until it is stopped."""
    return clusters.up("seen", "--workers=1", "--detach", "--", *ENDLESS)


def listening(pid: int) -> set[int]:
    """Return the ports on which something listens on every interface of a process' network."""
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables for line in table]
    return {
        int(at.rpartition(":")[2], 16)
        for _, at, _, state, *_ in sockets
        if state == LISTENS and at.rpartition(":")[0] in ANYWHERE
    }


def doors_of(run: RunFolder) -> tuple[set[Door], set[Door]]:
    """Return the addresses and ports at which a run's servers might be reached, and those where they are."""
    wait_for(lambda: step_of(run) > 0, "the first step")
    ports = {task.port for task in run.load_cluster().tasks}
    pid = read_json(run.programs("chief"))["program"]["pid"]
    assert ports <= listening(pid)  # TensorFlow's doing, whatever address it is given
    everywhere = {(address, port) for address in doors.addresses() for port in ports}
    return everywhere, {door for door in everywhere if doors.speaks(*door)}


def test_servers_must_be_reached_from_their_own_network_alone(training):
    if refused := namespaces.refusal():
        pytest.skip(refused.why)
    assert "private" == read_json(training.manifest)["network"]
    assert set() == doors_of(training)[1]


@pytest.mark.extended
def test_metrics_must_be_served_while_a_run_trains_through_a_fault_and_until_it_stops(clusters):
    (port,) = free_ports(1)
    clusters.up("scraped", f"--metrics-port={port} --detach", "--", *ENDLESS)
    first = wait_for(lambda: (page := scrape(port)).get(("tf_cluster_loss",)) and page, "a logged step")
    assert first["tf_cluster_step",] > 0 == first["tf_cluster_restarts_total",]
    clusters.invoke("chaos", "kill", "chief", "--run=scraped")
    after = wait_for(lambda: (page := scrape(port))["tf_cluster_step",] > first["tf_cluster_step",] and page, "a step")
    assert (1, 1) == (after["tf_cluster_generation",], after["tf_cluster_restarts_total",])
    clusters.invoke("stop", "scraped")
    with pytest.raises(urllib.error.URLError):
        scrape(port)


@pytest.fixture(scope="module")
def seen(clusters, training) -> RunFolder:
    """The run, of which worker-0 was profiled while it trained."""
    lines = clusters.invoke("profile", "worker-0", "--steps", "3", "--run", "seen").splitlines()
    (head,) = [line for line in lines if line.startswith("worker-0: steps ")]
    assert head.endswith(" traced (5, 3 steps requested: whole calls of the training are traced)")
    wait_for(lambda: step_of(training) >= FEWEST_STEPS, f"step {FEWEST_STEPS}")
    clusters.invoke("stop", "seen")
    return training


@pytest.fixture(scope="module")
def unseen(clusters, seen) -> RunFolder:
    """A run of as many steps that nobody looked at."""
    return clusters.up("unseen", f"--workers=1 -- --max-steps {summary(seen)['steps']}")


@pytest.mark.long
def test_profiling_worker_0_must_leave_a_trace_and_not_change_the_bits(clusters, seen, unseen):
    (trace,) = (seen.tensorboard("worker-0") / "plugins" / "profile").glob("*/*.xplane.pb")
    assert trace.stat().st_size > 10_000
    assert not list(seen.tensorboard("chief").glob("plugins/profile/*"))
    assert summary(unseen)["weights_sha256"] == summary(seen)["weights_sha256"]
    refused = clusters.invoke("profile", "worker-0", "--run", "seen", expect=2)
    assert "run 'seen' has ended, so nothing trains in it" in refused


@pytest.mark.long
def test_every_task_must_report_its_pace_and_the_chief_where_the_time_went(unseen):
    ended = summary(unseen)
    assert {"chief", "worker-0"} == set(ended["pace"]["tasks"])
    for pace in ended["pace"]["tasks"].values():
        assert 10 < pace["steps"] < ended["steps"]  # the first one compiles, and of short ones a sample is marked
        assert 0 <= pace["input_share"] <= pace["busy_share"] <= 1
        assert pace["step_ms"]["p10"] <= pace["step_ms"]["p50"] <= pace["step_ms"]["max"]
    parts = ended["goodput_split"]
    assert abs(sum(parts.values()) - ended["wall_s"]) < 0.1
    assert all(parts[name] > 0 for name in ("start", "compile", "compute", "save", "evaluate"))
    assert 0 == parts["lost"] == parts["restart"]
