"""The hash-locked requirements of each environment, or target.

`requirements/TARGET.in` has the requirements of a target with their reasons, `constraints.txt` the version of each
package that all targets share, and `TARGET.lock` the hashes that pip checks. A lock is complete, so pip installs it
without resolving dependencies (`--no-deps`). No file names a package index, which is left to pip's settings.
"""

import re
from dataclasses import dataclass

from cluster.system.files import ROOT

DIRECTORY = "requirements"
TARGETS = ("build", "host", "train-cpu", "train-gpu", "tensorboard", "dev", "peer-ray")
CONSTRAINTS = f"{DIRECTORY}/constraints.txt"


@dataclass(frozen=True)
class Pin:
    """One locked package."""

    name: str
    version: str
    marker: str
    """The environments to which the pin applies, as a PEP 508 marker; empty for all."""

    def applies(self, python: str = "") -> bool:
        """Return whether the pin applies to this machine, for this Python or for a version such as `3.11`."""
        from packaging.markers import Marker  # here, since `up` does not need it

        other = {"python_version": python, "python_full_version": f"{python}.0"} if python else {}
        return not self.marker or Marker(self.marker).evaluate(other)


def pins(target: str) -> list[Pin]:
    """Return the packages that a target's lock pins."""
    text = (ROOT / DIRECTORY / f"{target}.lock").read_text()
    found = re.findall(r"^([\w.-]+)==(\S+)(?: ; (.+?))? \\$", text, re.MULTILINE)
    return [Pin(name, version, marker) for name, version, marker in found]
