"""What is reported of the hosts of a runtime, and what a task on each of them measures."""

from typing import Any

import pytest

from cluster.agent.schedulers import probe
from cluster.host.runtime import hosts
from tests.support.waiting import together

FIXES = hosts.Fixes("silent", "data", "network")


def report(node: str, **more: Any) -> dict[str, Any]:
    return {"node": node, "data": True, "unreached": "", "skew_s": 0.1, "mb_per_s": 900.0, "lag_s": 0.1, **more}


@pytest.mark.parametrize(
    ("reports", "wrong"),
    [
        ([report("n1"), report("n2")], {}),
        ([report("n1", unreached="worker-0 did not start")], {"hosts": "failed"}),
        ([], {"hosts": "failed"}),
        ([report("n1"), report("n2", data=False)], {"data on hosts": "failed"}),
        ([report("n1"), report("n2", skew_s=-9.0)], {"clocks": "warning"}),
        ([report("n1"), report("n2", lag_s=20.0)], {"shared folder": "warning"}),
        ([report("n1"), report("n2", mb_per_s=10.0)], {"bandwidth of hosts": "warning"}),
        ([report("n1", unreached="missing worker-0"), report("n2")], {"network of hosts": "failed"}),
    ],
)
def test_what_a_host_lacks_is_reported_with_its_fix(reports, wrong):
    found = hosts.judge(["n1", "n2"], reports, {"n2": "No such image"}, FIXES)
    assert wrong == {each.check: each.state for each in found if each.state != "ok"}
    assert all(each.fix for each in found if each.state != "ok")


def test_hosts_measure_their_clocks_and_bandwidth(make_run, tmp_path, monkeypatch):
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    run = make_run(workers=2)
    cluster, found = run.load_cluster(), []

    def look(number: int) -> None:
        found.append(probe.examine(run, cluster, cluster.tasks[number], f"n{number}"))

    together(look, 3)
    assert {"n0", "n1", "n2"} == {each["node"] for each in found}
    assert all(each["data"] and not each["unreached"] and each["mb_per_s"] > 0 for each in found), found
    assert max(abs(each["skew_s"]) for each in found) < hosts.SKEW_S
    assert max(each["lag_s"] for each in found) < probe.REACH_S


def test_a_clock_that_is_ahead_is_measured(make_run):
    one, other = make_run(workers=1).load_cluster().tasks
    links = {}

    def measure(at: int) -> None:
        here, there = (one, other) if at else (other, one)
        links[at] = probe.measure(here, there, lambda: 1000.0 if at else 1100.0)

    together(measure, 2)
    assert (100.0, -100.0) == (links[1].skew_s, links[0].skew_s)


def test_a_host_that_is_not_reached_is_named(make_run, tmp_path, monkeypatch):
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "missing"))
    monkeypatch.setattr(probe, "REACH_S", 0.2)
    run = make_run(workers=1)
    cluster = run.load_cluster()
    found = probe.examine(run, cluster, cluster.tasks[0], "n1")
    assert "worker-0" in found["unreached"]
    assert not found["data"]
