"""The reference of a run with faults: a run of the same training without faults, which must end with the same bits."""

from statistics import median
from typing import Any

from cluster.contract.run import membership, records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Summary
from cluster.contract.schema import Record, dictionary
from cluster.system.json_files import DamagedError

NO_EFFECT_ON_BITS = {
    "log_every",
    "checkpoint_every",
    "check_replicas",
    "memory_snapshots",
    "keep_checkpoints",
    "steps_per_loop",
}


def find_reference(run: RunFolder) -> dict[str, Any] | None:
    """Return the name and hash of the newest undisturbed run of the same training; None without one."""
    reference, training = None, _training(run)
    if training is None:
        return None
    for path in sorted(run.path.parent.glob("*/summary.json"), key=lambda path: path.lstat().st_mtime):
        other = RunFolder(path.parent)
        summary = other.load_summary()
        undisturbed = summary is not None and summary.state == "succeeded" and len(other.generations()) == 1
        if summary and undisturbed and other.name != run.name and _training(other) == training:
            reference = {"run": other.name, "weights_sha256": summary.weights_sha256}
    return reference


def fault_lines(run: RunFolder) -> list[str]:
    """Return the lines about injected faults that are printed at the end of a run."""
    faults = [event for event in run.events() if event.event == "fault"]
    if not faults:
        return []
    line = f"faults       {len(faults)} injected"
    summary = run.load_summary()
    resumed = [cost.resumed_s for cost in (summary.restarts if summary else ()) if cost.resumed_s is not None]
    if resumed:
        line += f"; next new step after {median(resumed):.2f} s (median), {max(resumed):.2f} s (most)"
    reference = find_reference(run)
    if reference is None or (same := same_bits(run, reference)) is None:
        return [line]
    result = "the same bits as" if same else "NOT those of"
    return [line, f"weights      {result} the undisturbed run {reference['run']}"]


def same_bits(run: RunFolder, reference: dict[str, Any] | None = None) -> bool | None:
    """Return whether a run ended with the weights of its reference run; None if they cannot be compared."""
    if not (reference := reference or find_reference(run)):
        return None
    summary = records.read_record(run.summary, Summary.from_json)
    resized = any(event.event == "scaled" for event in run.events()) or membership.changes(run)
    if resized and not run.load_config().get("bitwise_elastic"):
        return None  # a different number of workers sums in a different order
    if not run.load_cluster().kind.synchronous or summary.state != "succeeded":
        return None
    weights = summary.weights_sha256  # None for a script
    return None if weights is None else bool(reference["weights_sha256"] == weights)


def _training(run: RunFolder) -> tuple[Any, ...] | None:
    """Return everything that determines a run's bits; None if its records are damaged."""
    try:
        manifest = run.load_manifest({})
        code = manifest.get("code", {}).get("train_sha256"), manifest.get("own_code"), manifest.get("locks")
        config = {key: value for key, value in run.load_config().items() if key not in NO_EFFECT_ON_BITS}
        version = records.read_record(run.data_version, dictionary(Record), {}).get("version")
        if run.load_config().get("bitwise_elastic"):
            return config, version, code
        spec = run.load_cluster()
        return config, version, code, spec.strategy, spec.devices, sorted(task.name for task in spec.members)
    except DamagedError:
        return None
