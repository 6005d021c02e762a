"""A campaign: which faults are drawn, when they are injected and undone, and how runs are counted."""

import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks import documents
from cluster.contract import spec
from cluster.contract.recovery.step_record import StepRecord
from cluster.contract.run.folder import RunFolder
from cluster.host.image import checkout
from cluster.host.runtime import registry
from cluster.system.errors import UsageError
from cluster.system.json_files import write_json
from tests.support.waiting import wait_for
from tests.tools.campaign import campaign, injection, record, volleys
from tests.tools.campaign.cases import CASES
from tests.tools.campaign.injection import Injection
from tests.tools.campaign.volleys import Shot, Volley

FAULT = {"kind": "kill", "task": "chief", "phase": "step", "step": 3}


def row(case: str, count: int = 4, **values: Any) -> record.Row:
    given = {"lost": "", "bits": record.SAME, "seconds": 1.0} | values
    return record.row(case, "0-0", "abc", [FAULT] * count, **given)


def test_an_interrupted_campaign_ends_the_run_in_progress_before_its_folder_goes(monkeypatch):
    ended: list[tuple[str, bool]] = []

    def start(words: object, *, env: dict[str, str], **others: object) -> None:
        (Path(env["RUNS_DIR"]) / "calm-containers").mkdir()

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkout, "commit", lambda: "abc")
    monkeypatch.setattr("subprocess.Popen", start)
    monkeypatch.setattr(campaign, "wait_until", interrupt)
    monkeypatch.setattr(campaign, "_kill", lambda run: ended.append((run.name, run.path.exists())))
    with pytest.raises(KeyboardInterrupt):
        campaign.main([CASES["containers"]], 1, 0, 60.0, lambda line: None)
    assert [("calm-containers", True)] == ended


@pytest.mark.parametrize(
    ("values", "failed"),
    [({}, False), ({"lost": "failed: chief: x"}, True), ({"bits": record.CHANGED}, True)],
)
def test_a_lost_run_or_a_changed_bit_fails_the_campaign(values, failed):
    assert failed is campaign.failed([row("fit"), row("one", **values)])


def test_the_table_counts_the_rows():
    rows = [row("fit"), row("fit", lost="no"), row("ps", bits=record.NOT_COMPARED), row("one", bits=record.CHANGED)]
    rows.append(row("fit"))
    lines = record.table(rows)
    assert "| `fit` | 3 | 12 | 1 | 3 | 0 |" in lines
    assert "| `ps` | 1 | 4 | 0 | 0 | 0 |" in lines
    assert "| all | 5 | 20 | 1 | 4 | 1 |" in lines
    assert "| since the last run that was lost or changed | 1 | 4 | 0 | 1 | 0 |" in lines
    assert {f"`{name}`" for name in CASES} <= {line.split(" | ")[0].removeprefix("| ") for line in lines}


def test_the_table_in_the_document_is_the_record_s():
    assert record.table(record.read()) == documents.written(record.PAGE, record.BEGIN)


KINDS = set(volleys.WEIGHTS)
CLUSTER = spec.build(workers=2)


def drawn(seed: str, count: int, kinds: set[str] = KINDS) -> list[tuple[Volley, Volley]]:
    return list(islice(volleys.draw(CLUSTER, seed, kinds), count))


def test_the_same_seed_draws_the_same_faults():
    first, again, other = (drawn(seed, 50) for seed in ("a 1", "a 1", "a 2"))
    assert first == again != other


def test_every_kind_phase_task_and_number_of_faults_is_drawn():
    pairs = [pair for seed in range(20) for pair in drawn(str(seed), 50)]
    shots = [shot for middle, _ in pairs for shot in middle.shots]
    assert KINDS == {shot.kind for shot in shots}
    assert {task.name for task in CLUSTER.tasks} == {shot.task for shot in shots}
    assert {"", *volleys.OPENING, *volleys.RECOVERING} == {shot.phase for shot in shots}
    assert {1, 2, 4, 5, 6, 7} == {len(middle.shots) for middle, _ in pairs}
    assert {"kill"} == {shot.kind for middle, _ in drawn("b", 50, {"kill"}) for shot in middle.shots}


def test_a_run_is_resumed_once_at_most():
    for seed in range(20):
        shots = [shot.kind for middle, _ in drawn(str(seed), 200) for shot in middle.shots]
        assert 1 == sum(kind in volleys.ENDING for kind in shots)


TOTAL = 100


def beat(run: RunFolder, task: str, state: str, step: int, *, generation: int = 0) -> None:
    values = {"task": task, "state": state, "generation": generation, "step": step, "steps_total": TOTAL}
    write_json(run.status(task), values | {"updated_at": time.time()})
    StepRecord(run, task, generation).done(step)


class Injected:
    """Takes faults instead of the processes of a run."""

    refuses = gone = False

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def faults(self, _run: RunFolder) -> "Injected":
        return self

    def reaches(self, _task: str, which: str) -> bool:
        assert which in ("program", "agent")
        return not self.gone

    def inject(self, kind: str, task: str, *, whole: bool = False) -> None:
        if self.refuses:
            raise UsageError(f"{task} has no program yet")
        self.calls.append((kind, task, whole))

    def undo(self, task: str) -> None:
        self.calls.append(("undo", task))


@pytest.fixture
def run(make_run: Any) -> RunFolder:
    made = make_run(workers=2)
    for task in ("chief", "worker-0"):
        beat(made, task, "training", 5)
    return made


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> "Injected":
    made = Injected()
    monkeypatch.setattr(registry, "find_runtime", lambda _run: made)
    monkeypatch.setattr(injection, "PHASE_S", 0.01)
    monkeypatch.setattr(injection, "PROCESS_S", 0.01)
    monkeypatch.setattr(injection, "LAST_STEPS_S", 0.01)
    return made


def one(kind: str, task: str = "worker-0", phase: str = "step", steps: int = 0, lasts_s: float = 0.0) -> Volley:
    return Volley(steps, 0.0, (Shot(kind, task, phase, 0.0, lasts_s),))


def inject(run: RunFolder, *drawn: Volley) -> list[dict[str, Any]]:
    made = Injection(run, iter([(volley, volley) for volley in drawn]), len(drawn))
    made.inject(time.monotonic() + 60, time.monotonic() + 60)
    return made.faults


def test_a_fault_is_recorded_with_the_phase_in_which_its_task_was(run: RunFolder, injected: Injected) -> None:
    beat(run, "worker-0", "waiting", 0)
    first = inject(run, one("kill", phase="rendezvous"))
    beat(run, "chief", "saving", TOTAL)
    made = Injection(run, iter([(one("slow"), one("agent", "chief", phase="export"))] * 3), 3)
    made.inject(time.monotonic() + 60, time.monotonic() + 60)
    last = made.faults[:1]
    assert [("kill", "worker-0", False), ("kill", "chief", True)] == injected.calls[:2]
    assert [("kill", "rendezvous"), ("agent", "export")] == [(each["kind"], each["phase"]) for each in first + last]


def test_a_phase_that_does_not_come_is_not_waited_for_without_end(run: RunFolder, injected: Injected) -> None:
    (found,) = inject(run, one("kill", phase="compile"))
    assert "step" == found["phase"]


def test_what_lasts_is_undone_even_if_the_run_ends_meanwhile(run: RunFolder, injected: Injected) -> None:
    ended = threading.Thread(target=_end_after, args=(run, injected))
    ended.start()
    inject(run, one("pause", lasts_s=0.05), one("kill", steps=1000))
    ended.join()
    assert [("pause", "worker-0", False), ("undo", "worker-0")] == injected.calls


def _end_after(run: RunFolder, injected: Injected) -> None:
    wait_for(lambda: injected.calls, "the first fault")
    write_json(run.summary, {})


@pytest.mark.parametrize("why", ["refuses", "gone"])
def test_a_fault_that_cannot_be_injected_does_not_count(run: RunFolder, injected: Injected, why: str) -> None:
    setattr(injected, why, True)
    assert [] == inject(run, one("kill"))
