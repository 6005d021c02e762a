"""The undisturbed twin of a run that had faults: the same training without them, which must end with the same bits."""

from __future__ import annotations

from statistics import median
from typing import Any

from cluster.run import records
from cluster.run.fields import anything
from cluster.run.folder import RunFolder
from cluster.system.json_files import DamagedError


def find(run: RunFolder) -> dict[str, Any] | None:
    """Return the newest run that differs from this one in nothing but its faults, with its name; None without one."""
    found, mine = None, _computes(run)
    if mine is None:
        return None
    for path in sorted(run.path.parent.glob("*/summary.json"), key=lambda path: path.lstat().st_mtime):
        other = RunFolder(path.parent)
        summary = other.ended
        calm = summary is not None and summary["state"] == "succeeded" and len(other.generations()) == 1
        if summary and calm and other.name != run.name and _computes(other) == mine:
            found = {"run": other.name, "weights_sha256": summary["weights_sha256"]}
    return found


def same_bits(run: RunFolder) -> bool | None:
    """Whether a run ended with the weights of its undisturbed twin; None where there is nothing to compare."""
    calm = find(run)
    return None if calm is None else _same_bits(run, calm)


def fault_lines(run: RunFolder) -> list[str]:
    """Return what a run on which faults were inflicted says of them at its end; nothing for any other."""
    inflicted = [event for event in run.events() if event["event"] == "fault"]
    if not inflicted:
        return []
    told = f"faults       {len(inflicted)} inflicted"
    restarts = (run.ended or {}).get("restarts", [])
    resumed = [cost["resumed_s"] for cost in restarts if cost["resumed_s"] is not None]
    if resumed:
        told += f"; next new step after {median(resumed):.2f} s (median), {max(resumed):.2f} s (most)"
    calm = find(run)
    if calm is None or (same := _same_bits(run, calm)) is None:
        return [told]
    return [told, f"weights      {'the same bits as' if same else 'NOT those of'} the undisturbed run {calm['run']}"]


def _same_bits(run: RunFolder, calm: dict[str, Any]) -> bool | None:
    summary = records.read(run.summary, records.summary)
    if not _elastic(run) and any(event["event"] == "scaled" for event in run.events()):
        return None  # another number of workers adds up in another order
    if not run.load_cluster().kind.synchronous or summary["state"] != "succeeded":
        return None
    if summary["weights_sha256"] is None:
        return None  # a script tells none
    return bool(calm["weights_sha256"] == summary["weights_sha256"])


def _elastic(run: RunFolder) -> bool:
    """Whether a run gives the same bits on any number of replicas."""
    return bool(run.load_config().get("bitwise_elastic"))


def _computes(run: RunFolder) -> tuple[Any, ...] | None:
    """Return what decides a run's bits; None where its records do not say it."""
    try:
        return _decisive(run)
    except DamagedError:
        return None


def _decisive(run: RunFolder) -> tuple[Any, ...]:
    # How often is told or saved, and how many steps one call does, changes no bit.
    aside = {"log_every", "checkpoint_every", "checkpoint_seconds", "keep_checkpoints", "steps_per_loop"}
    config = {key: value for key, value in run.load_config().items() if key not in aside}
    version = records.read(run.control / "data.json", anything, {}).get("version")
    if _elastic(run):
        return config, version
    spec = run.load_cluster()
    return config, version, spec.strategy, spec.devices, sorted(task.name for task in spec.members)
