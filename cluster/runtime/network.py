"""Which network a run's tasks are in: one of their own, or, as local processes may, this machine's.

TensorFlow's servers listen on every interface and ask for no password, and nothing in TensorFlow changes that. So local
tasks get a network of their own where the machine allows one, and a warning where they do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.errors import PrerequisiteError, UsageError, nearest
from cluster.findings import Finding
from cluster.system import namespaces

PRIVATE, HOST = "private", "host"
CHECK = "task network"
EXPOSED = "TensorFlow's servers ask for no password, and whoever reaches this machine reaches them"
INSTEAD = "containers, or a firewall, close them"


@dataclass(frozen=True)
class Network:
    """The network of a run's tasks."""

    name: str = PRIVATE
    """`private`, of the tasks alone; or `host`, this machine's."""
    asked: str = ""
    """`--network` as typed, for when the run goes on."""
    warning: str = ""
    """Who can reach the tasks, and why; empty where nobody can."""


def choose(typed: str, had: str, *, contained: bool, way_out: str, serves: bool) -> Network:
    """Return the network that a run's tasks get.

    Args:
        typed: `--network`; empty where it was left out.
        had: what was asked for when the run began, for one that goes on.
        contained: whether the tasks are containers, which have a network of their own anyway.
        way_out: what the tasks must reach outside of this machine, in words; empty where that is nothing.
        serves: whether TensorFlow's servers run.

    Raises:
        UsageError: what was asked for is no network, or not theirs to choose.
        PrerequisiteError: this machine gives no network of their own to tasks that must have one.
    """
    if typed not in ("", PRIVATE, HOST):
        raise UsageError(f"--network {typed!r} is not a network{nearest(typed, [PRIVATE, HOST])}")
    if contained:
        if typed == HOST:
            raise UsageError(
                "--network host with containers: theirs is their own; add --runtime local, or leave it out"
            )
        return Network(PRIVATE, typed or had)
    asked = typed or had
    if (asked or (HOST if way_out else PRIVATE)) == HOST:
        why = f"as asked (--network {HOST})" if asked else f"{way_out}; --network {PRIVATE} does without"
        return Network(HOST, asked, _warning(why) if serves else "")
    refused = namespaces.refusal()
    if refused is None:
        return Network(PRIVATE, asked)
    if asked:
        raise PrerequisiteError(
            f"--network {PRIVATE}: tasks can have no network of their own here: {refused.why}; {refused.fix}, or "
            "leave it out"
        )
    why = f"they can have no network of their own: {refused.why}; {refused.fix}, or {INSTEAD}"
    return Network(HOST, asked, _warning(why) if serves else "")


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
