"""The hash-locked requirements: which environments there are, and what each locks.

`requirements/TARGET.in` says what a target needs and why, `constraints.txt` holds the one version of every package that
all targets share, and `TARGET.lock` holds the hashes that pip checks. A lock is complete, so pip installs what it holds
and looks up no dependencies (`--no-deps`). No file names a package index: pip's own settings choose it.
"""

import re
from dataclasses import dataclass

from cluster.system.paths import ROOT

DIRECTORY = "requirements"
TARGETS = ("build", "host", "train-cpu", "train-gpu", "tensorboard", "dev", "peer-ray")
CONSTRAINTS = f"{DIRECTORY}/constraints.txt"


@dataclass(frozen=True)
class Pin:
    """One locked package."""

    name: str
    version: str
    marker: str
    """The environments that want it, as in PEP 508; empty for all."""

    def applies(self, python: str = "") -> bool:
        """Return whether the pin applies to this machine, for this Python or for a version such as `3.11`."""
        from packaging.markers import Marker  # here, because `up` does without it

        other = {"python_version": python, "python_full_version": f"{python}.0"} if python else {}
        return not self.marker or Marker(self.marker).evaluate(other)


def pins(target: str) -> list[Pin]:
    """Return the packages that a target's lock pins."""
    text = (ROOT / DIRECTORY / f"{target}.lock").read_text()
    found = re.findall(r"^([\w.-]+)==(\S+)(?: ; (.+?))? \\$", text, re.MULTILINE)
    return [Pin(name, version, marker) for name, version, marker in found]
