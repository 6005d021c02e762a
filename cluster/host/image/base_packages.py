"""The Debian packages of the base image: the versions on record, and how an image differs from them.

    python -m cluster.host.image.base_packages

A mirror serves the newest versions alone. So a base made on another day may hold others: `up` and `image.build` say
which, and `image.base` and `image.reproduce`, which promise the same bytes, fail.
"""

from __future__ import annotations

import sys

from cluster.host.image import engine
from cluster.host.image.images import DEBIAN_BASE
from cluster.system.errors import ClusterError, PrerequisiteError
from cluster.system.messages import counted
from cluster.system.paths import ROOT

RECORD = ROOT / "docker" / "base-packages.txt"
RENEW = "invoke image.base --renew"
SHOWN = 3
TIMEOUT_S = 60.0
_FORMAT = "--showformat=${Package} ${Version}\\n"


def check() -> None:
    """Check that the base on this engine holds what is on record."""
    if problem := difference(_installed(), RECORD.read_text()):
        raise PrerequisiteError(problem)


def renew() -> None:
    """Record what the base on this engine holds."""
    RECORD.write_text(_installed())


def difference(installed: str, recorded: str) -> str:
    """Return in one line how two lists differ; empty where they do not."""
    here, there = (dict(line.split(" ", 1) for line in text.splitlines()) for text in (installed, recorded))
    changed = [
        f"{name} {here.get(name, 'missing')} instead of {there.get(name, 'none')}"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
    if not changed:
        return ""
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return (
        f"{DEBIAN_BASE} differs from {RECORD.relative_to(ROOT)} in {counted(len(changed), 'package')}: "
        f"{', '.join(changed[:SHOWN])}{more}; use a mirror of that day, or record the new ones: `{RENEW}`"
    )


def _installed() -> str:
    words = ("run", "--rm", "--network=none", "--entrypoint=dpkg-query", DEBIAN_BASE, "--show", _FORMAT)
    code, text = engine.ask(*words, timeout_s=TIMEOUT_S)
    if code:
        raise PrerequisiteError(f"the packages of {DEBIAN_BASE} cannot be listed ({text}); run `invoke image.base`")
    return "".join(f"{line}\n" for line in sorted(text.splitlines()))


if __name__ == "__main__":
    try:
        check()
    except ClusterError as error:
        print(f"warning: {error}", file=sys.stderr)
