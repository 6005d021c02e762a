"""Predictions and distances of runs' weights, from a process that may import TensorFlow; its output is checked."""

from __future__ import annotations

import base64
import binascii
import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

from cluster.contract.run import provenance
from cluster.contract.run.folder import RunFolder
from cluster.contract.schema import Count, Measured, Number, Record, count, dictionary, listing, optional, text
from cluster.host.launch import folders
from cluster.system import files, processes
from cluster.system.errors import UsageError
from cluster.system.paths import ROOT

TIMEOUT_S = 300.0
_PNG = b"\x89PNG\r\n\x1a\n"


def _png(value: Any) -> str:
    try:
        if base64.b64decode(text(value), validate=True).startswith(_PNG):
            return str(value)
    except binascii.Error:
        pass
    raise ValueError("expected a PNG in base64")


@dataclass(frozen=True, kw_only=True)
class _Wrong(Record):
    truth: str
    said: str
    share: Number
    png: Annotated[str | None, optional(_png)]


@dataclass(frozen=True, kw_only=True)
class _Classified(Record):
    classes: Annotated[list[str], listing(text, 1000)]
    confusion: Annotated[list[list[int]], listing(listing(count, 1000), 1000)]
    wrong: Annotated[list[dict[str, Any]], listing(dictionary(_Wrong), 100)]


@dataclass(frozen=True, kw_only=True)
class _Distance(Record):
    of: str
    comparable: bool
    identical: bool = False
    weights: Count = 0
    largest: Measured = None
    relative: Measured = None
    where: str = ""


class Unavailable(Exception):
    """Why the weights cannot be examined."""


def classify(run: RunFolder, *, trust: bool) -> dict[str, Any]:
    """Return how a run's export classifies the test split, see `train/inspection.py`.

    Raises:
        Unavailable: it does not classify, or its export or data is missing.
    """
    value = _inspect("classify", [run], _Classified, trust=trust)
    if any(len(row) != len(value["classes"]) for row in value["confusion"]):
        raise Unavailable("the export's classes are not those of the data")
    return value


def distance(one: RunFolder, other: RunFolder, *, trust: bool) -> dict[str, Any]:
    """Return how far the final weights of two runs are apart, see `train/inspection.py`.

    Raises:
        Unavailable: not both have final weights.
    """
    return _inspect("distance", [one, other], _Distance, trust=trust)


def _inspect(verb: str, runs: list[RunFolder], record: type[Record], *, trust: bool) -> dict[str, Any]:
    try:
        for run in runs:
            if not trust:
                provenance.check(run)
            for part in (run.checkpoints, run.export):
                files.refuse_links(part)  # TensorFlow would follow them
    except (UsageError, OSError) as error:
        raise Unavailable(str(error)) from None
    named = [word for run in runs for word in ("--run-dir", str(run.path.absolute()))]
    data = ["--data-dir", str(folders.data_dir())]
    command = [sys.executable, "-m", "train.inspection", verb, *named, *data]
    code, output, errors = processes.run(command, TIMEOUT_S, "reading the weights", cwd=ROOT)
    try:
        if code == 0:
            return dictionary(record)(json.loads(output))
    except (ValueError, RecursionError) as error:
        errors = str(error)
    raise Unavailable((errors.strip().splitlines() or [f"it ended with {code}"])[-1].removeprefix("error: "))
