"""The membership of a generation: with `--min-workers`, a run continues without lost workers.

`cluster.json` lists every requested task. The record of a generation lists the tasks that it leaves out, so a
generation's cluster never changes, and a returning task knows whether it is a member. Only the chief's agent begins a
generation with other members.
"""

import os
from collections import Counter
from pathlib import Path

from cluster.contract.run import launch_records, records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import MembershipChange
from cluster.contract.spec import ClusterSpec


def left_out(run: RunFolder, generation: int | None = None) -> frozenset[str]:
    """Return the tasks that a generation leaves out, by default the current one."""
    record = run.generation_record(run.generation if generation is None else generation)
    return record.left_out if record else frozenset()


def cluster(run: RunFolder, generation: int | None = None) -> ClusterSpec:
    """Return the cluster of a generation, by default the current one; raise DamagedError without `cluster.json`."""
    return run.load_cluster().without(left_out(run, generation))


def cluster_with_addresses(run: RunFolder) -> ClusterSpec:
    """Return every requested task with its address, which is known only after the start under some schedulers.

    Raises DamagedError without a valid record of the cluster.
    """
    if path := os.environ.get("CLUSTER_JSON"):
        return records.read_record(Path(path), launch_records.cluster)
    return run.load_cluster()


def times_left_out(run: RunFolder) -> dict[str, int]:
    """Return how often each task was left out, without tasks that never were."""
    return Counter(name for change in changes(run) for name in change.lost)


def changes(run: RunFolder) -> list[MembershipChange]:
    """Return the changes of the membership, in order of the generations."""
    found, before = [], frozenset[str]()
    for record in run.generations():
        now = record.left_out
        if now != before:
            found.append(
                MembershipChange(
                    generation=record.generation,
                    step=max(0, record.saved),
                    lost=tuple(sorted(now - before)),
                    regained=tuple(sorted(before - now)),
                    left_out=tuple(sorted(now)),
                )
            )
        before = now
    return found
