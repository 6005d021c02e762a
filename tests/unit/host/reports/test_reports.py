"""The table of runs, their comparison and the page about one: what they show, and what a hostile run cannot do."""

import html.parser
import json
import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host.reports import listing, page
from cluster.host.view.columns import thinned
from cluster.host.view.status import ended_lines
from cluster.system.errors import EXIT_USAGE, UsageError
from cluster.system.json_files import append_json, read_json, write_json
from tests.support.command_line import exit_code

EVIL = "</style><script>alert(1)</script><img src=http://example.invalid/x onerror=alert(1)>\x1b[2J"


@pytest.fixture
def ended(make_run) -> Callable[..., RunFolder]:
    """Makes a run that trained for some steps and ended."""

    def make(name: str = "one", rate: float = 0.1, sha256: str | None = "a" * 64, **summary: Any) -> RunFolder:
        run = make_run(name, workers=1)
        write_json(run.config, {"global_batch": 96, "optimizer": {"learning_rate": rate}})
        write_json(run.manifest, {"code": {"commit": "0123456789abcdef", "changes_sha256": None}, "runtime": "local"})
        for step in range(1, 6):
            append_json(run.metrics("chief"), {"step": step, "loss": rate / step, "accuracy": step / 10, "time": step})
        run.event("worker-0", "fault", step=3, kind="kill")
        run.event("chief", "first step", step=1)
        run.end("succeeded")
        restart = {"generation": 1, "task": "worker-0", "cause": "killed", "detected_s": 0.5, "resumed_s": 2.25}
        split = {"input": 1.0, "compute": 6.0, "start": 2.0, "restart": 1.0}
        value = {"state": "succeeded", "steps": 5, "wall_s": 10.0, "weights_sha256": sha256, "restarts": [restart]}
        value |= {"metrics": {"eval_accuracy": 0.9, "eval_loss": 0.3}, "goodput_split": split}
        write_json(run.summary, value | summary)
        return run

    return make


class Page(html.parser.HTMLParser):
    """Checks that every tag is closed in turn, and collects tags, attributes that load or run something, and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.loading: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert [] == self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loading += [name for name, _ in attrs if name in ("src", "href") or name.startswith("on")]
        if tag not in {"meta", "img", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


def test_runs_are_listed_the_newest_first(ended, make_run, capsys):
    write_json(ended("old").control / "started.json", {"time": 1.0, "runtime": "local"})
    make_run("new", workers=2).begin_generation(1, resumed=True)  # by `scale`: not a restart
    assert 0 == exit_code("runs", json=True)
    new, old = json.loads(capsys.readouterr().out)["runs"]
    assert ("new", "not started", 3, 0) == (new["run"], new["result"], new["tasks"], new["restarts"])
    assert ("old", "succeeded", "accuracy", 0.9, "01234567", 1) == tuple(
        old[name] for name in ("run", "result", "metric", "score", "commit", "restarts")
    )
    assert old["disk_bytes"] > 0
    assert 0 == exit_code("runs")
    assert 3 == len(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("updated_at", "damaged", "expected"), [(0, False, "training"), (1.0, False, "lost"), (0, True, "damaged")]
)
def test_a_run_without_a_sign_of_life_is_lost_and_a_damaged_one_listed_as_such(make_run, updated_at, damaged, expected):
    run = make_run("one", workers=0)
    beat = {"task": "chief", "state": "training", "updated_at": updated_at or time.time()}
    write_json(run.status("chief"), beat)
    if damaged:
        run.cluster.write_text("{")
        write_json(run.manifest, {"code": [EVIL]})
        assert 1 == exit_code("status", run="one")
    (row,) = listing.list_runs(run.path.parent)
    assert expected == row["result"]
    assert listing.table_lines([row])


def test_a_narrow_terminal_shows_of_the_runs_what_matters(make_run, monkeypatch):
    found = listing.list_runs(make_run("fashion_mnist-20261122-230318", workers=2).path.parent)
    assert set(listing.table_lines(found)[0].split()) == set(listing.COLUMNS) - {"TAGS", "NOTE"}
    for width in (80, 100, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        head, row = listing.table_lines(found)
        assert max(len(head), len(row)) <= width
        assert {"RUN", "RESULT", "DURATION", "SCORE", "DISK"} <= set(head.split())


def test_runs_are_chosen_by_tag_and_value_and_sorted_with_unknown_values_last(ended, make_run):
    for name, accuracy in (("one", 0.7), ("two", 0.9), ("three", 0.8)):
        run = ended(name, metrics={"eval_accuracy": accuracy})
        write_json(run.control / "started.json", {"time": 1.0, "tags": ["wide", name], "note": f"about {name}"})
    make_run("new")
    found = listing.list_runs(run.path.parent)

    def names(sort: str = "", reverse: bool = False, filters: tuple[str, ...] = (), limit: int = 0) -> list[str]:
        return [row["run"] for row in listing.choose_runs(found, sort, reverse, filters, limit)]

    assert ["one", "three", "two", "new"] == names("score")
    assert ["two", "three", "one", "new"] == names("score", reverse=True)
    assert ["two", "three"] == names("score", reverse=True, limit=2)
    assert ["three"] == names(filters=("tag=wide", "tag=three"))
    assert ["new"] == names(filters=("result=not started",))
    assert {"TAGS", "NOTE"} < set(listing.table_lines(found)[0].split())
    (line,) = listing.table_lines([], ("tag=narrow",))
    assert line.startswith("no run passes --filter tag=narrow; ")
    for wrong in ({"sort": "scroe"}, {"filters": ("tag",)}, {"filters": ("tags=wide",)}):
        with pytest.raises(UsageError):
            names(**wrong)


@pytest.mark.parametrize(
    ("metrics", "metric", "reached"),
    [
        ({"eval_loss": 0.2, "eval_absolute_error": 0.3561}, "absolute_error", 0.3561),
        ({"eval_loss": 0.2, "eval_digit_accuracy": 0.75, "eval_parity_loss": 0.1}, "digit_accuracy", 0.75),
        ({"eval_loss": 0.25}, "loss", 0.25),
        ({"eval_loss": 0.25, "eval_accuracy": None}, "loss", 0.25),
        ({"loss": 0.25}, None, None),
        ({}, None, None),
    ],
)
def test_a_run_is_shown_with_its_own_metric(ended, metrics, metric, reached):
    run = ended("one", metrics=metrics)
    row = listing.describe_run(run)
    assert (metric, reached) == (row["metric"], row["score"])
    shown = "" if metric is None else f"{metric} {reached:.4f}"
    assert shown in ended_lines(run)[0]
    assert not metric or {metric, f"{reached:.4f}"} <= set(listing.table_lines([row])[1].split())
    results = listing.compare_runs([run, ended("two", metrics={})])["results"]
    assert {name: [value, None] for name, value in metrics.items()}.items() <= results.items()
    assert (metric or "score") in page._head(run, row)


def test_only_what_differs_is_compared_and_no_secret(ended):
    one, other = ended("one", rate=0.1), ended("other", rate=0.2)
    variables = {"TF_CLUSTER_TOKEN": "x", "MY_PASSWORD": "y", "CORES": 2}
    write_json(other.manifest, read_json(other.manifest) | {"environment": {"variables": variables}})
    value = listing.compare_runs([one, other])
    assert {"config.optimizer.learning_rate", "environment.variables.CORES"} == set(value["differences"])
    assert [0.1, 0.2] == value["differences"]["config.optimizer.learning_rate"]
    assert value["weights"][0]["identical"] is True
    assert any("0.2" in line for line in listing.comparison_lines(value, [one, other]))
    others = ended("third", sha256="b" * 64), ended("fourth", sha256=None)
    assert [False, None] == [pair["identical"] for pair in listing.compare_runs([one, *others])["weights"]]


@pytest.mark.parametrize("names", [("one", ""), ("one", "one"), ("one", "none"), ("", "")])
def test_compare_needs_two_runs(ended, names):
    ended("one")
    assert EXIT_USAGE == exit_code("compare", *names)


def test_curves_hold_finite_numbers_of_every_name(run):
    for value in (1.0, "x", None, True, math.inf, 2.0):
        with run.metrics("chief").open("a") as file:
            file.write(json.dumps({"step": 1, "odd": value}) + "\n")
    assert [(1, 1.0), (1, 2.0)] == page.read_curves(run)["odd"]


@pytest.mark.parametrize("values", [(0.0, 1.0), (2.0, 2.0), (-5.0, 1e9), (1e-9, 2e-9), (0.0, 0.0)])
def test_ticks_enclose_the_values(values):
    found = page.ticks(*values)
    assert found[0] <= values[0] + 1e-6 * abs(values[0])
    assert found[-1] >= values[1] - 1e-6 * abs(values[1])
    assert 2 <= len(found) <= 9
    long = [(float(at), values[0]) for at in range(100_001)]
    thin = thinned(long, page.MAX_POINTS)
    assert len(thin) <= page.MAX_POINTS
    assert (long[0], long[-1]) == (thin[0], thin[-1])


def test_a_page_shows_the_run_and_needs_no_network(ended, make_run, capsys):
    assert "Cluster" in Page(page.render_page(make_run("new", workers=1))).text
    run = ended("one")
    assert 0 == exit_code("report", "one")
    text = (run.path / "report.html").read_text()
    shown = Page(text)
    for part in ("Curves", "Restarts", "0.9000", "2.25 s", "60%"):
        assert part in shown.text
    assert [] == shown.loading
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    (run.path / "link.html").symlink_to("report.html")
    for output in ("missing/x.html", "checkpoints", "link.html"):
        assert EXIT_USAGE == exit_code("report", "one", output=str(run.path / output))
    assert (run.path / "link.html").is_symlink()


def test_a_hostile_run_cannot_change_its_page(ended):
    run = ended("one", weights_sha256=EVIL, state="failed", cause={"task": EVIL, "error": EVIL})
    write_json(run.config, {"global_batch": 1, EVIL: EVIL})
    write_json(run.environment, {EVIL: [EVIL]})
    write_json(run.manifest, {"code": {"commit": EVIL}, "image": EVIL})
    append_json(run.metrics("chief"), {"step": 7, EVIL[:50]: 1.0})
    run.event(EVIL, "fault", step=1, kind=EVIL)
    run.begin_generation(1, task=EVIL, cause=EVIL)
    shown = Page(page.render_page(run))
    assert EVIL in shown.text
    assert "script" not in shown.tags
    assert [] == shown.loading
