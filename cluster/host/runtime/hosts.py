"""What the hosts of a runtime lack, from what a task on each of them found."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.contract.findings import Finding

SKEW_S = 2.0
"""Largest difference of two clocks that passes: heartbeats that are 8 s old count as lost."""
LAG_S = 3.0
"""Longest that passes until a host shows what another wrote, for the same reason."""
SLOW_MB_S = 50.0
"""Less than half of what gigabit Ethernet carries: gradients of a megabyte already take longer than a step."""


@dataclass(frozen=True)
class Fixes:
    """What to do where something is missing.

    Attributes:
        silent: a host does not answer.
        data: it does not see the data.
        network: it does not reach another.
    """

    silent: str
    data: str
    network: str


def judge(
    hosts: Collection[str], reports: Collection[Mapping[str, Any]], errors: Mapping[str, str], fixes: Fixes
) -> list[Finding]:
    """Return the findings.

    Args:
        hosts: that must answer.
        reports: what each of them found, as `cluster.agent.schedulers.probe.examine` returns it.
        errors: what the scheduler says of those that did not answer; under the empty name, of all.
        fixes: what to do.
    """
    missing = sorted({*hosts} - {each["node"] for each in reports})
    if missing:
        said = "; ".join(dict.fromkeys(errors.get(name) or errors.get("", "") or "no reason given" for name in missing))
        found = Finding("hosts", "failed", f"no answer from {', '.join(missing)}: {said}", fixes.silent)
    else:
        found = Finding("hosts", "ok", f"{len(hosts)} run the agent and see the folder of runs")
    if not reports:
        return [found]
    blind = sorted(each["node"] for each in reports if not each["data"])
    data = Finding("data on hosts", "ok", "its folder is there")
    if blind:
        data = Finding("data on hosts", "failed", f"not on {', '.join(blind)}", fixes.data)
    if missing:  # whom the others do not reach either
        return [found, data]
    unreached = [f"{each['node']}: {each['unreached']}" for each in reports if each["unreached"]]
    network = Finding("network of hosts", "ok", "every host reaches every other")
    if unreached:
        network = Finding("network of hosts", "failed", unreached[0], fixes.network)
    return [found, data, network, *_links([each for each in reports if "skew_s" in each])]


def _links(reports: Collection[Mapping[str, Any]]) -> list[Finding]:
    """Return what is found of the folder that hosts share, their clocks, and the bandwidth between them."""
    if not reports:
        return []
    lag_s = max(each["lag_s"] for each in reports)
    folder = Finding("shared folder", "ok", f"each host shows within {lag_s:.1f} s what another writes")
    if lag_s > LAG_S:
        late = max(reports, key=lambda each: each["lag_s"])["node"]
        fix = "mount it so that changes show at once, such as NFS with actimeo=1"
        folder = Finding("shared folder", "warning", f"{late} shows after {lag_s:.0f} s what others write", fix)
    skew, slowest = max(abs(each["skew_s"]) for each in reports), min(reports, key=lambda each: each["mb_per_s"])
    clocks = Finding("clocks", "ok", f"within {skew:.2f} s")
    if skew > SKEW_S:
        clocks = Finding("clocks", "warning", f"differ by up to {skew:.1f} s", "have every host keep time by NTP")
    speed = f"{slowest['mb_per_s']:,.0f} MB/s or more from each host to another at the same time"
    if slowest["mb_per_s"] < SLOW_MB_S:
        fix = "use the hosts' fastest network; larger batches and --micro-batches make fewer steps of the same work"
        return [folder, clocks, Finding("bandwidth of hosts", "warning", f"{slowest['node']} is slow: {speed}", fix)]
    return [folder, clocks, Finding("bandwidth of hosts", "ok", speed)]
