"""Simulated hosts on one machine: network namespaces with slow links between them.

Needs root, and `ip` and `tc` of iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NETWORK = "10.213"
GATEWAY = "169.254.1.1"
"""The router's address on each link."""
TITLE = "links of 1 Mbit/s"
QUEUE = "rate 1mbit burst 2kb latency 1s"
"""Token bucket filter (tc-tbf(8)) of each direction of each host's link; a packet that waits longer than its latency is
dropped."""


@dataclass(frozen=True)
class Host:
    """A network namespace.

    Attributes:
        space: its name, for `ip netns exec`.
        address: its address for the other hosts.
    """

    space: str
    address: str


def refusal() -> str | None:
    """Return why this machine cannot have such hosts; None if it can."""
    if os.geteuid():
        return "needs root"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    return f"{' and '.join(missing)} missing: apt-get install iproute2" if missing else None


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Provide hosts that reach each other and nothing else; remove them at the end.

    Each has a link to a router in a separate namespace, out of reach of a Docker Engine's packet filter. On a bridge
    they would fill the kernel's neighbour table, which all namespaces share.

    Raises:
        subprocess.CalledProcessError: a command failed.
    """
    prefix = f"bench-{os.getpid()}"
    router = f"{prefix}-router"
    made = [Host(f"{prefix}-{n}", f"{NETWORK}.{n // 250}.{n % 250 + 1}") for n in range(count)]
    try:
        _ip(f"netns add {router}", *(f"netns add {host.space}" for host in made))
        _run(["ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1"])
        for number, host in enumerate(made):
            port = f"port{number}"
            _ip(
                f"link add {port} type veth peer name eth0 netns {host.space}",
                f"address add {GATEWAY} dev {port}",
                f"link set {port} up",
                f"route add {host.address} dev {port}",
                space=router,
            )
            _ip(
                f"address add {host.address} dev eth0",
                "link set eth0 up",
                "link set lo up",
                f"route add {GATEWAY} dev eth0",
                f"route add default via {GATEWAY}",
                space=host.space,
            )
            for space, device in ((router, port), (host.space, "eth0")):
                _run(["tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *QUEUE.split()])
        yield made
    finally:
        for space in (*(host.space for host in made), router):  # its devices go with it
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


def _ip(*lines: str, space: str = "") -> None:
    """Run lines as `ip` commands, in a namespace if one is named."""
    where = ["-n", space] if space else []
    _run(["ip", *where, "-batch", "-"], "\n".join(lines))


def _run(command: list[str], text: str = "") -> None:
    subprocess.run(command, input=text, text=True, check=True, capture_output=True)
