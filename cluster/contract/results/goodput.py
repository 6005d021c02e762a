"""Splits the wall time of a run by activity, from the chief's ledgers and the times of failures."""

from collections.abc import Iterable, Mapping, Sequence

from cluster.contract.run.records import TimeLedger

PARTS = ("start", "compile", "input", "compute", "save", "evaluate", "lost", "restart", "other")


def split(
    started: float, ended: float, ledgers: Sequence[TimeLedger], failures: Mapping[int, float]
) -> dict[str, float] | None:
    """Return the seconds of each part of `PARTS`, which add up to the time from `started` to `ended`.

    The result is None without a ledger: for a script, or a run that never began to train. The chief's `ledgers`, one
    per generation, may begin before `started`; `failures` maps a generation to the time of the failure that caused it.

    `start`: until the program began to train; `compile`: the first step; both only before the first failure;
    `restart`: from a failure to the next new step; `lost`: steps that were repeated; `input` and `compute`: in the
    other steps, waiting for input and everything else; `other`: the rest, such as the end.
    """
    ledgers = sorted((ledger for ledger in ledgers if ledger.began >= started), key=lambda ledger: ledger.generation)
    if not ledgers:
        return None
    seconds = dict.fromkeys(PARTS, 0.0)
    accounted_until, down_since = started, None
    for generation in sorted({ledger.generation for ledger in ledgers} | set(failures)):
        ledger = next((ledger for ledger in ledgers if ledger.generation == generation), None)
        if down_since is None and generation in failures:
            down_since = failures[generation]
        if ledger is None:
            continue
        first_step = ledger.first_step_at
        end = min([time for number, time in failures.items() if number > generation] + [ended])
        if down_since is not None:
            if first_step is not None:
                seconds["restart"] += max(0.0, first_step - down_since)
                down_since = None
        else:
            seconds["start"] += max(0.0, ledger.began - accounted_until)
            seconds["compile"] += max(0.0, (end if first_step is None else first_step) - ledger.began)
        next_first = next((later.first for later in ledgers if later.generation > generation), ledger.step)
        for part, part_s in _with_lost_steps(ledger, next_first).items():
            seconds[part] += part_s
        accounted_until = ledger.updated_at
    if down_since is not None:
        seconds["restart"] += max(0.0, ended - down_since)
    wall_s = ended - started
    excess = sum(seconds.values()) - wall_s
    if excess > 0:  # clocks of two machines differ, or a step ended while another task was failing
        seconds["compute"] = max(0.0, seconds["compute"] - excess)
    rounded = {part: round(part_s, 3) for part, part_s in seconds.items()}
    return rounded | {"other": round(max(0.0, wall_s - sum(rounded.values())), 3)}


def share(parts: Mapping[str, float] | None) -> float | None:
    """Return the share of steps that count, with their input, in the times of `split`; None if unknown."""
    wall_s = sum(parts.values()) if parts else 0.0
    return (parts["input"] + parts["compute"]) / wall_s if parts and wall_s else None


def checkpoint_every_s(newest_first: Iterable[TimeLedger]) -> float | None:
    """Return the planned seconds between checkpoints, from the newest ledger that has them; None if set in steps."""
    return next((ledger.saves for ledger in newest_first if ledger.saves), {}).get("every_s")


def line(parts: Mapping[str, float]) -> str:
    """Format a split in one line, largest part first, without parts below one percent."""
    wall_s = sum(parts.values())
    input_s = parts.get("input", 0.0)
    train_s = input_s + parts.get("compute", 0.0)
    rest = {name: seconds for name, seconds in parts.items() if name not in ("input", "compute")}
    waiting = _percent(input_s, wall_s)
    note = {"train": f" ({waiting} % input)" if waiting else ""}
    ordered = sorted({"train": train_s, **rest}.items(), key=lambda part: -part[1])
    shown = [f"{name} {_percent(s, wall_s)} %{note.get(name, '')}" for name, s in ordered if _percent(s, wall_s)]
    return ", ".join(shown)


def _percent(part_s: float, wall_s: float) -> int:
    return round(100 * part_s / wall_s) if wall_s > 0 else 0


def _with_lost_steps(ledger: TimeLedger, next_first: int) -> dict[str, float]:
    """Return the seconds of a ledger; steps after `next_first`, which the next generation repeated, are `lost`."""
    seconds = {name: ledger.seconds.get(name, 0.0) for name in ("input", "compute", "save", "evaluate")}
    repeated = min(ledger.timed_steps, max(0, ledger.step - next_first))
    lost = repeated / ledger.timed_steps if ledger.timed_steps else 0.0
    seconds["lost"] = lost * (seconds["input"] + seconds["compute"])
    seconds |= {part: (1 - lost) * seconds[part] for part in ("input", "compute")}
    return seconds
