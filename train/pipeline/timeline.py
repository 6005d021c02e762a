"""The timeline of a pipeline's stages in some steps: recorded by its tasks, read together, drawn as a picture.

Every task records the same steps, with its machine's clock: the picture shows stages on several machines shifted by the
difference of their clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image, ImageDraw

from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.schema import Count, Record, Seconds, listing, mapping, one_of
from cluster.system.errors import PrerequisiteError
from cluster.system.files import make_folder, open_file
from cluster.system.json_files import write_json
from train.pipeline.schedule import Action, Instruction, Span

KEPT = 4
"""Steps in a task's record; tasks may be at different steps when they are read."""
COLOURS = {Action.FORWARD: "#4e79a7", Action.BACKWARD: "#e1812c", Action.UPDATE: "#6b8e4e"}
WIDTH, ROW, MARGIN, TOP, LEFT = 1200, 56, 10, 52, 150


@dataclass(frozen=True, kw_only=True)
class _Span(Record):
    stage: Count
    action: Annotated[str, one_of(*(action.value for action in COLOURS))]
    micro_batch: Count
    begin_s: Seconds
    end_s: Seconds


_timeline = mapping(listing(_Span.from_json))


def computing(spans: Sequence[Span]) -> float:
    """Return the total seconds of computation of all stages."""
    return sum(span.end_s - span.begin_s for span in spans)


class Recorder:
    """Records the steps of a task's stages in the run folder."""

    def __init__(self, run: RunFolder, task: str) -> None:
        self._path = run.timeline(task)
        self._steps: dict[str, list[dict[str, Any]]] = {}
        make_folder(self._path.parent)

    def add(self, step: int, spans: Sequence[Span]) -> None:
        """Record step `step`, counted from 1."""
        self._steps[str(step)] = [_to_json(span) for span in spans]
        self._steps = dict(list(self._steps.items())[-KEPT:])
        write_json(self._path, self._steps)


def read(run: RunFolder) -> tuple[int, list[Span]]:
    """Return the newest step that all tasks of a run have recorded, and its computations."""
    names = [task.name for task in run.load_cluster().members] or ["chief"]
    recorded = [records.read(run.timeline(name), _timeline, {}) for name in names]
    common = set(recorded[0]).intersection(*recorded[1:])
    steps = [int(step) for step in common if step.isdecimal()]
    if not steps:
        raise PrerequisiteError(
            f"run {run.name!r} has no timeline: it does not use --strategy pipeline, or has done too few steps"
        )
    spans = [_from_record(span) for task_steps in recorded for span in task_steps[str(max(steps))]]
    return max(steps), spans


def draw(spans: Sequence[Span], title: str, stages_each: int = 0) -> np.ndarray:
    """Draw a step, `[H, W, 3] uint8`, with a row for each stage and a box for each computation.

    Args:
        spans: computations of the step; stages of several pipelines have consecutive numbers.
        stages_each: stages per pipeline; 0 if there is only one.
    """
    stages = 1 + max(span.stage for span in spans)
    begin, end = min(span.begin_s for span in spans), max(span.end_s for span in spans)
    scale = (WIDTH - LEFT - MARGIN) / max(end - begin, 1e-9)
    picture = Image.new("RGB", (WIDTH, TOP + stages * (ROW + MARGIN) + 30), "white")
    pen = ImageDraw.Draw(picture)
    pen.text((MARGIN, 8), f"{title}: {(end - begin) * 1000:.1f} ms", fill="black")
    for at, (action, colour) in enumerate(COLOURS.items()):
        pen.rectangle((MARGIN + 110 * at, 28, MARGIN + 110 * at + 12, 40), fill=colour)
        pen.text((MARGIN + 110 * at + 18, 28), action.value, fill="black")
    for stage in range(stages):
        computations = [span for span in spans if span.stage == stage]
        top = TOP + stage * (ROW + MARGIN)
        share = computing(computations) / max(end - begin, 1e-9)
        pipeline, number = divmod(stage, stages_each or stages)
        name = f"stage {number}" if stages_each in (0, stages) else f"{pipeline}, stage {number}"
        pen.text((MARGIN, top + ROW // 2 - 6), f"{name}: {share:.0%} busy", fill="black")
        pen.rectangle((LEFT, top, WIDTH - MARGIN, top + ROW), fill="#ececec")
        for span in computations:
            _box(pen, span, LEFT + (span.begin_s - begin) * scale, LEFT + (span.end_s - begin) * scale, top)
    _axis(pen, end - begin, scale, TOP + stages * (ROW + MARGIN))
    return np.asarray(picture)


def save(run: RunFolder, path: Path) -> int:
    """Write the picture of a run's newest recorded step as PNG; return the step."""
    step, picture = picture_of(run)
    try:
        with open_file(path, "wb") as file:
            Image.fromarray(picture).save(file, "PNG")
    except OSError as error:
        raise PrerequisiteError(f"{path}: {error.strerror}; name another file") from error
    return step


def picture_of(run: RunFolder) -> tuple[int, np.ndarray]:
    """Return the newest step that all tasks of a run have recorded, and its picture."""
    step, spans = read(run)
    config = run.load_config()
    schedule, micro_batches = config.get("pipeline", {}).get("schedule", ""), config.get("micro_batches", 1)
    return step, draw(spans, f"{schedule}, {micro_batches} micro-batches, step {step}", run.load_cluster().stages)


def _box(pen: ImageDraw.ImageDraw, span: Span, left: float, right: float, top: int) -> None:
    pen.rectangle((left, top, max(right - 1, left), top + ROW), fill=COLOURS[span.instruction.action])
    text = str(span.instruction.micro_batch)
    if span.instruction.action is not Action.UPDATE and right - left > 7 * len(text) + 4:
        pen.text((left + 4, top + ROW // 2 - 6), text, fill="white")


def _axis(pen: ImageDraw.ImageDraw, seconds: float, scale: float, top: int) -> None:
    for part in range(6):
        place = LEFT + scale * seconds * part / 5
        pen.line((place, top, place, top + 5), fill="black")
        pen.text((min(place, WIDTH - 60), top + 8), f"{seconds * 200 * part:.0f} ms", fill="black")


def _to_json(span: Span) -> dict[str, Any]:
    return {
        "stage": span.stage,
        "action": span.instruction.action.value,
        "micro_batch": span.instruction.micro_batch,
        "begin_s": span.begin_s,
        "end_s": span.end_s,
    }


def _from_record(span: _Span) -> Span:
    return Span(span.stage, Instruction(Action(span.action), span.micro_batch), span.begin_s, span.end_s)
