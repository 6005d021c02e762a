"""Training must give what plain Keras gives, or be refused: models and settings are drawn from a seed."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import fast
from tests.differential.refused import REFUSALS, parsed

ROOT = Path(__file__).parents[2]
CASES = (
    "182",  # a mask reaches the output with replicas, which are killed once
    "2",  # weights of examples, clipping and micro-batches in fit
    "3",  # three stages by 1F1B
    "2232:micro_batches=1;callbacks='';layers=('own_optimizer',)",  # a clipping optimizer in a dictionary of a model
    "7",  # rows of an embedding, frozen layers and a batch of two epochs, in fit on two replicas
)
"""Cases of `make test`, each of one task."""
EXTENDED = (
    "0",  # fit on three replicas
    "1",  # layers that keep averages, on three replicas
    "60:strategy='central';replicas=2;loop='fit';micro_batches=2",  # it hung
    "36:precision='fp32';tasks=3",  # weights shared by stages, clipped and averaged, in three processes or in one
    "36:precision='fp32';tasks=3;layers=('blocks',)",  # layers in lists, saved by three processes
    "379",  # PipeDream in two stages
    "668",  # a mask reaches the output of fit on two replicas, with weights and BatchNormalization
    "81138:steps=1;hidden=0",  # masks, layers' state and micro-batches on three tasks
    "435:precision='fp32'",  # stages that compute their forward pass again
)
MORE = (
    "87:optimizer='nadam';precision='fp32'",  # it failed in its first step
    "374",  # a mask reaches the output: with virtual shards,
    "680",  # with micro-batches in fit
    "1069:killed_at=();hidden=0",  # and on a remote worker, which hung
    "624",  # fit in float16
    "80069:layers=('double',);steps=2;hidden=0",  # several types in fit
    "81016:steps=2;hidden=0",  # masks between stages
    "85070:steps=1;hidden=0",  # a stage of frozen weights takes part in clipping, which hung
    "435:precision='fp32';layers=('dropout',)",  # what stages drop that compute their forward pass again
    "435:precision='fp32';remat=False;layers=('double','pretrained','dropout');clip=0.1",  # several types in stages
)
"""Cases of `make test-all`, before those of the first seeds."""
ALL, EACH = 100, 25
"""How many seeds `make test-all` tries, and each of its tests."""
PROCESSES = 2
LIMIT_S = 3600


@pytest.fixture(scope="module")
def run_cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[str]], dict[str, dict[str, Any]]]:
    """Runs cases in two processes, and those in half precision in a third; returns what came out of each."""
    fast.leave_out("starts TensorFlow")

    def run(cases: Sequence[str]) -> dict[str, dict[str, Any]]:
        folder, processes = tmp_path_factory.mktemp("cases"), []
        half = [case for case in cases if parsed(case).precision != "fp32"]
        full = [case for case in cases if case not in half]
        variables = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONHASHSEED": "0"}
        groups = [group for group in (*(full[number::PROCESSES] for number in range(PROCESSES)), half) if group]
        for number, group in enumerate(groups):
            command = [sys.executable, "-m", "tests.differential.cases", str(folder / str(number)), *group]
            with (folder / f"{number}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=os.environ | variables | {"ONEDNN": "off" if group is half else ""},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
        found = {}
        for number, process in enumerate(processes):
            process.wait(timeout=LIMIT_S)
            lines = (folder / f"{number}.log").read_text().splitlines()
            results = [json.loads(line) for line in lines if line.startswith('{"case"')]
            assert len(results) == len(groups[number]), "\n".join(lines[-30:])
            found |= {result["case"]: result for result in results}
        return found

    return run


@pytest.fixture(scope="module")
def quick(run_cases: Callable[[Sequence[str]], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The results of the cases of `make test`, and of an example for each row of the table of refusals."""
    return run_cases([*CASES, *(f"refused:{number}" for number in range(len(REFUSALS)))])


def report(result: dict[str, Any]) -> str:
    """Describe the errors of a case, with the program that shows them without our code."""
    seed = result["case"]
    how = f"python -m tests.differential.cases /tmp/cases {shlex.quote(seed)}  # this case alone"
    return "\n".join([f"seed {seed}: {'; '.join(result['wrong'])}", how, "what plain Keras gives:", result["program"]])


@pytest.mark.parametrize("case", CASES)
def test_a_case_must_train_as_plain_keras_does_or_be_refused(quick: dict[str, dict[str, Any]], case: str) -> None:
    assert not quick[case]["wrong"], report(quick[case])


@pytest.mark.parametrize("number", range(len(REFUSALS)), ids=[row.what for row in REFUSALS])
def test_what_the_table_lists_must_be_refused(quick: dict[str, dict[str, Any]], number: int) -> None:
    assert "refused" in quick[f"refused:{number}"], report(quick[f"refused:{number}"])


def test_the_documentation_must_have_the_table_of_refusals() -> None:
    _, rows = (ROOT / "docs" / "internals" / "differential.md").read_text().split("|---|---|---|\n")
    assert [row.what for row in REFUSALS] == [row.split(" | ")[0].removeprefix("| ") for row in rows.splitlines()]


@pytest.mark.long
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(EXTENDED, marks=pytest.mark.extended),
        MORE,
        *(tuple(map(str, range(first, min(first + EACH, ALL)))) for first in range(0, ALL, EACH)),
    ],
)
def test_many_cases_must_train_as_plain_keras_does(run_cases, cases):
    wrong = [result for result in run_cases(cases).values() if result["wrong"]]
    assert not wrong, "\n\n".join(report(result) for result in wrong)
