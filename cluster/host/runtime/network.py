"""Which network a run's tasks are in: one of their own, or, as local processes may, this machine's.

TensorFlow's servers listen on every interface and ask for no password, and nothing in TensorFlow changes that. So local
tasks get a network of their own where the machine allows one, and a warning where they do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.contract.findings import Finding
from cluster.system import namespaces
from cluster.system.errors import PrerequisiteError, UsageError, nearest

PRIVATE, HOST, ENCRYPTED, EGRESS = "private", "host", "encrypted", "egress"
CHECK = "task network"
EXPOSED = "TensorFlow's servers ask for no password, and whoever reaches this machine reaches them"
INSTEAD = "containers, or a firewall, close them"


@dataclass(frozen=True)
class Network:
    """The network of a run's tasks."""

    name: str = PRIVATE
    """`private`, of the tasks alone; `encrypted`, the same over several hosts; `egress`, the same with a way out; or
    `host`, this machine's."""
    requested: str = ""
    """`--network` as typed, for when the run goes on."""
    warning: str = ""
    """Who can reach the tasks, and why; empty where nobody can."""


def check(requested: str, *allowed: str) -> None:
    """Check `--network`.

    Args:
        requested: as typed.
        allowed: the networks that there are; by default those of this machine.

    Raises:
        UsageError: it is no network, or none that there is.
    """
    known = allowed or (PRIVATE, HOST)
    if requested and requested not in known:
        raise UsageError(f"--network {requested!r} is not a network here{nearest(requested, known)}")


def of_processes(typed: str, previous: str, *, way_out: str, serves: bool) -> Network:
    """Return the network of local tasks; see `Runtime.network` for the arguments.

    Raises:
        UsageError: what was requested is no network.
        PrerequisiteError: this machine gives no network of their own to tasks that must have one.
    """
    check(typed)
    requested = typed or previous
    if (requested or (HOST if way_out else PRIVATE)) == HOST:
        why = f"as requested (--network {HOST})" if requested else f"{way_out}; --network {PRIVATE} does without"
        return Network(HOST, requested, _warning(why) if serves else "")
    refused = namespaces.refusal()
    if refused is None:
        return Network(PRIVATE, requested)
    if requested:
        raise PrerequisiteError(
            f"--network {PRIVATE}: tasks can have no network of their own here: {refused.why}; {refused.fix}, or "
            "leave it out"
        )
    why = f"they can have no network of their own: {refused.why}; {refused.fix}, or {INSTEAD}"
    return Network(HOST, requested, _warning(why) if serves else "")


def _warning(why: str) -> str:
    return f"warning: {EXPOSED}: the tasks are in this machine's network, {why}"


def examine() -> Finding:
    """Return whether local tasks can have a network of their own here."""
    refused = namespaces.refusal()
    if refused is None:
        return Finding(CHECK, "ok", "local tasks get one of their own")
    return Finding(
        CHECK,
        "warning",
        f"local tasks are in this machine's own, for everybody to reach: {refused.why}",
        f"{refused.fix}; {INSTEAD}",
    )
