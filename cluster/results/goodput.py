"""Where the wall time of a run went, put together from what each life of the chief recorded and when tasks failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PARTS = ("start", "compile", "input", "compute", "save", "evaluate", "lost", "restart", "other")


def split(
    started: float, ended: float, lives: Sequence[Mapping[str, Any]], failures: Mapping[int, float]
) -> dict[str, float] | None:
    """Return the seconds of each part of `PARTS`, which add up to the time between `started` and `ended`.

    Args:
        started, ended: seconds since the epoch.
        lives: what the chief recorded of each of its lives (`train/telemetry/ledger.py`), whenever they were.
        failures: the generations that a failure began, and when that happened.

    Returns:
        None where the chief recorded nothing: a script, or a run that never came that far.

        `start`: until the training program began to train, `compile`: its first step, where no failure came before;
        `restart`: from a failure to the next new step; `lost`: steps that were done again; `compute`: the other steps
        without what the chief waited for `input`; `other`: not told, such as the end.
    """
    lives = sorted((life for life in lives if life["began"] >= started), key=lambda life: life["generation"])
    if not lives:
        return None
    seconds = dict.fromkeys(PARTS, 0.0)
    told_until, down_since = started, None
    for generation in sorted({life["generation"] for life in lives} | set(failures)):
        life = next((life for life in lives if life["generation"] == generation), None)
        if down_since is None and generation in failures:
            down_since = failures[generation]
        if life is None:
            continue
        first_step = life["first_step_at"]
        gone = min([moment for number, moment in failures.items() if number > generation] + [ended])
        if down_since is not None:
            if first_step is not None:
                seconds["restart"] += first_step - down_since
                down_since = None
        else:
            seconds["start"] += life["began"] - told_until
            seconds["compile"] += max(0.0, (gone if first_step is None else first_step) - life["began"])
        after = next((later["first"] for later in lives if later["generation"] > generation), life["step"])
        for part, told in _of_life(life, after).items():
            seconds[part] += told
        told_until = life["updated_at"]
    if down_since is not None:
        seconds["restart"] += ended - down_since
    return _whole(seconds, ended - started)


def checkpoint_every_s(newest_first: Iterable[Mapping[str, Any]]) -> float | None:
    """Return how far apart checkpoints were meant to be in the newest life that saved any; None if by steps."""
    saves: Mapping[str, Any] = next((life["saves"] for life in newest_first if life.get("saves")), {})
    return saves.get("every_s")


def line(parts: Mapping[str, float]) -> str:
    """Return a split in one line, the largest part first and what is next to nothing left out."""
    wall_s = sum(parts.values())
    train_s = parts["input"] + parts["compute"]
    rest = {name: told for name, told in parts.items() if name not in ("input", "compute")}
    waiting = _percent(parts["input"], wall_s)
    shown = {"train": f" ({waiting} % input)" if waiting else ""}
    ordered = sorted({"train": train_s, **rest}.items(), key=lambda part: -part[1])
    told = [f"{name} {_percent(s, wall_s)} %{shown.get(name, '')}" for name, s in ordered if _percent(s, wall_s)]
    return ", ".join(told)


def _percent(part_s: float, wall_s: float) -> int:
    return round(100 * part_s / wall_s) if wall_s > 0 else 0


def _of_life(life: Mapping[str, Any], after: int) -> dict[str, float]:
    """Return the seconds of one life's work; the next one went on from step `after`."""
    seconds = dict(life["seconds"])
    again = min(life["timed_steps"], max(0, life["step"] - after))
    lost = again / life["timed_steps"] if life["timed_steps"] else 0.0
    seconds["lost"] = lost * (seconds["input"] + seconds["compute"])
    seconds |= {part: (1 - lost) * seconds[part] for part in ("input", "compute")}
    return seconds


def _whole(seconds: dict[str, float], wall_s: float) -> dict[str, float]:
    """Return the parts rounded, and what is left of the wall time as `other`."""
    too_much = sum(seconds.values()) - wall_s
    if too_much > 0:  # clocks of two machines, or a step that ended while another task was failing
        seconds["compute"] = max(0.0, seconds["compute"] - too_much)
    told = {part: round(s, 3) for part, s in seconds.items()}
    return told | {"other": round(max(0.0, wall_s - sum(told.values())), 3)}
