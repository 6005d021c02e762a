"""The metrics of a run: the page that Prometheus reads, its server, and the dashboard and alerts about them."""

import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from ruamel.yaml import YAML

from cluster.contract.run import owner
from cluster.host.launch import metrics_server, planning, startup, teardown
from cluster.host.options.request import Request
from cluster.system.errors import EXIT_PREREQUISITE, PrerequisiteError
from cluster.system.files import ROOT
from cluster.system.json_files import write_json
from cluster.system.ports import free_ports
from tests.support.beats import LEDGER, beat, end, save
from tests.support.exposition import Page, read_page, scrape
from tests.support.launching import Commands, no_shell
from tests.support.waiting import wait_for

DOCS = ROOT / "docs" / "reference"


@pytest.fixture
def page(run) -> Page:
    """The page of a run in progress that was restarted and whose worker is silent."""
    began = time.time() - 100
    write_json(run.control / "started.json", {"time": began})
    write_json(run.ledger(0), LEDGER | {"began": began + 1, "first_step_at": began + 2, "updated_at": began + 7})
    save(run, 10)
    run.begin_generation(1, task="worker-0", cause="killed", step=15)
    run.event("worker-0", "restarted")
    run.event("evaluator", "restarted")
    pace = {"step_ms": {"median": 88.0}, "busy_share": 0.75, "input_share": 0.25}
    beat(run, "chief", step=20, steps_total=120, examples_per_s=480.0, loss=0.5, restarts=1, generation=1, **pace)
    beat(run, "worker-0", age_s=60)
    return read_page(metrics_server.render_metrics(run))


def test_the_page_has_what_is_known_of_a_run_and_of_its_tasks(page):
    values = {"step": 20, "planned_steps": 120, "examples_per_second": 480, "loss": 0.5, "checkpoint_step": 10}
    values |= {"restarts_total": 2, "generation": 1}
    assert values == {name: page[f"tf_cluster_{name}",] for name in values}
    values = {"step": 20, "step_seconds": 0.088, "busy_ratio": 0.75, "input_ratio": 0.25, "restarts_total": 1}
    assert values == {name: pytest.approx(page[f"tf_cluster_task_{name}", "chief"]) for name in values}
    ages = page["tf_cluster_checkpoint_age_seconds",], page["tf_cluster_task_heartbeat_age_seconds", "worker-0"]
    assert 0 <= ages[0] < 60 <= ages[1]
    states = {series[1:] for series, value in page.items() if series[0].endswith("_state") and value}
    assert {("running",), ("chief", "training"), ("worker-0", "lost")} == states
    parts = {series[1]: value for series, value in page.items() if series[0] == "tf_cluster_time_seconds"}
    assert (parts["input"] + parts["compute"]) / sum(parts.values()) == pytest.approx(page["tf_cluster_goodput_ratio",])


def test_the_page_of_an_ended_run_has_its_evaluation_under_any_name(run):
    write_json(run.summary, end(run, "failed") | {"metrics": {'a "\\\n name \ud800': 0.25}})
    page = read_page(metrics_server.render_metrics(run).encode(errors="replace").decode())
    assert (1, 0) == tuple(page["tf_cluster_run_state", state] for state in ("failed", "running"))
    assert 0.25 == page["tf_cluster_metric", 'a "\\\n name ?']


def test_the_dashboard_and_the_alerts_use_what_is_served(run, page):
    write_json(run.summary, end(run, "succeeded") | {"metrics": {"eval_loss": 0.25}})
    served = {series[0] for series in [*page, *read_page(metrics_server.render_metrics(run))]}
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    shown = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    assert {"tf_cluster_step"} < set(re.findall(r"tf_cluster_\w+", shown)) <= served
    (group,) = YAML(typ="safe").load(DOCS / "alerts.yml")["groups"]
    for rule in group["rules"]:
        assert {"alert", "expr", "labels", "annotations"} == set(rule) - {"for"}
        assert {"run", "task"} >= set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert set() < set(re.findall(r"tf_cluster_\w+", rule["expr"])) <= served
        assert [rule["expr"].count(each) for each in "({["] == [rule["expr"].count(each) for each in ")}]"]


@pytest.fixture
def port(run) -> Iterator[int]:
    """The port on which the metrics of a run are served."""
    (port,) = free_ports(1)
    owner.create_owner(run, "local")
    metrics_server.start(run, port)
    wait_for(lambda: is_open(port), "the server")
    yield port
    teardown.try_remove(run, no_shell)
    assert not is_open(port)


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow  # it waits for the timeouts
def test_slow_and_dead_clients_do_not_keep_others_from_the_metrics(port):
    with socket.create_connection(("127.0.0.1", port)) as dead, socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")  # and never the rest
        assert 0 == scrape(port)["tf_cluster_step",]
        assert (b"", b"") == (dead.recv(1), slow.recv(1))
    with pytest.raises(urllib.error.HTTPError) as refused:
        scrape(port, "/")
    assert 404 == refused.value.code
    with urllib.request.urlopen(urllib.request.Request(metrics_server.address(port), method="HEAD")) as answer:
        assert (200, b"") == (answer.status, answer.read())


def test_the_server_ends_once_its_run_is_deleted(run, port):
    run.delete()
    wait_for(lambda: not is_open(port), "the server to end")


def test_a_plan_shows_the_address_and_a_port_in_use_is_refused_before_anything_starts(resolved):
    with socket.create_server(("127.0.0.1", 0)) as server:
        planned = planning.plan(Request(runtime="local", metrics_port=(taken := server.getsockname()[1])))
        assert f"metrics {metrics_server.address(taken)}" in planned.notes
        with pytest.raises(PrerequisiteError) as refused:
            startup.start(planned, commands := Commands(), began=time.time())
    assert (EXIT_PREREQUISITE, [], False) == (refused.value.exit_code, commands, planned.run.path.exists())
