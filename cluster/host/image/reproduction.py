"""`invoke image.reproduce`: build an image again from nothing, and compare it file by file.

Both builds have separate tags, which are removed again: no image in use is replaced or deleted.
"""

from __future__ import annotations

import secrets
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.host.image import base_packages, contents, engine, images
from cluster.system.errors import UsageError, nearest
from cluster.system.messages import counted

BOTH = "both"
SHOWN = 20
TAG = "tf-cluster/reproduction"


@dataclass(frozen=True)
class Verdict:
    """Whether two images are the same."""

    image: str
    first: contents.Image
    second: contents.Image
    names: tuple[str, str]
    """What the two are called."""
    differences: list[contents.Difference]

    @property
    def identical(self) -> bool:
        """Nothing differs, in any file or setting."""
        return not self.differences

    def lines(self) -> list[str]:
        """The verdict as lines of text."""
        pair = f"{self.names[0]} and {self.names[1]}"
        if self.identical:
            size = f"{counted(self.first.num_files, 'file')} in {counted(len(self.first.layers), 'layer')}"
            layers = [
                f"layer {number}  {layer.digest}  {counted(len(layer.entries), 'path')}"
                for number, layer in enumerate(self.first.layers, 1)
            ]
            return [f"identical: {size} of {self.image}: {pair}", f"image    {self.first.id}", *layers]
        shown = [str(difference) for difference in self.differences[:SHOWN]]
        if more := len(self.differences) - len(shown):
            shown.append(f"and {more} more (--json lists all)")
        return [f"different: {self.image} in {counted(len(self.differences), 'place')}: {pair}", *shown]

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "image": self.image,
            "identical": self.identical,
            "files": self.first.num_files,
            "compared": [
                {"name": name, "id": each.id, "layers": [layer.digest for layer in each.layers]}
                for name, each in zip(self.names, (self.first, self.second), strict=True)
            ],
            "differences": [asdict(difference) for difference in self.differences],
        }


def chosen(image: str, against: str) -> tuple[str, ...]:
    """Return which images are to be built."""
    if image not in (*images.IMAGES, BOTH):
        raise UsageError(f"--image {image!r} is unknown{nearest(image, (*images.IMAGES, BOTH))}")
    if image == BOTH and against:
        raise UsageError(f"--against {against!r} is one image; say which one it is: --image train or tensorboard")
    return images.IMAGES if image == BOTH else (image,)


def examine(image: str, accelerator: str, against: str, sh: contents.Shell) -> Verdict:
    """Build an image from nothing, twice, or once to compare with an existing image or archive."""
    called = images.name(image, accelerator)
    engine.demand("building an image")
    other = _existing(against, sh) if against else None  # before a build of minutes
    base = images.default_base()
    for command in images.base_commands() if base.missing else []:
        sh(command)
    if base.name == images.DEBIAN_BASE:
        base_packages.check()

    def built() -> contents.Image:
        """Build an image; afterwards remove its tag, and the image unless it has another tag."""
        tag = f"{TAG}:{secrets.token_hex(4)}"
        sh(images.build_command(image, accelerator, base, "--no-cache", f"--tag={tag}"))
        try:
            return contents.saved(tag, sh)
        finally:
            sh(shlex.join(["docker", "image", "rm", tag]))

    first = built()
    names = ("a new build", against) if against else ("the first build", "the second build")
    second = other or built()
    return Verdict(called, first, second, names, contents.compare(first, second, names))


def _existing(against: str, sh: contents.Shell) -> contents.Image:
    """Return the contents of an existing image."""
    if Path(against).is_file():
        return contents.read(Path(against))
    if engine.ask("image", "inspect", "--format={{.Id}}", "--", against)[0] != 0:
        raise UsageError(
            f"--against {against!r} is neither an archive that `docker image save` wrote nor an image on this engine"
        )
    return contents.saved(against, sh)
