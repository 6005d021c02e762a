"""`invoke image.reproduce`: rebuilds an image from scratch, and compares it layer by layer.

Two images with the same configuration, date and layer hashes are identical. Ids are not compared, since engines compute
them differently. Both builds have separate tags, which are removed afterwards, so that no image in use is changed.
"""

import itertools
import json
import secrets
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster.host.image import engine, images
from cluster.system.errors import UsageError, nearest
from cluster.system.messages import counted

BOTH = "both"
TAG = "tf-cluster/reproduction"


@dataclass(frozen=True)
class Contents:
    """The engine's record of an image."""

    name: str
    layers: list[str]
    """The sha256 of each layer."""
    config: dict[str, Any]
    created: str


@dataclass(frozen=True)
class ImageComparison:
    """The comparison of two images."""

    image: str
    first: Contents
    second: Contents

    @property
    def identical(self) -> bool:
        """Whether all files and settings are the same."""
        return replace(self.first, name="") == replace(self.second, name="")

    @property
    def differing(self) -> list[int]:
        """The numbers of the layers that differ, from 1; empty if only the configuration differs."""
        pairs = itertools.zip_longest(self.first.layers, self.second.layers)
        return [number for number, (first, second) in enumerate(pairs, 1) if first != second]

    def lines(self) -> list[str]:
        pair = f"{self.first.name} and {self.second.name}"
        if self.identical:
            shown = [f"layer {number}  {digest}" for number, digest in enumerate(self.first.layers, 1)]
            return [f"identical: {counted(len(shown), 'layer')} of {self.image}: {pair}", *shown]
        what = f"layer {', '.join(map(str, self.differing))}" if self.differing else "the configuration"
        return [f"different: {self.image} in {what}: {pair}"]

    def to_json(self) -> dict[str, Any]:
        """Return the form of `--json`."""
        compared = [asdict(self.first), asdict(self.second)]
        return {"image": self.image, "identical": self.identical, "compared": compared, "differing": self.differing}


def choose_images(image: str, against: str) -> tuple[str, ...]:
    """Return the images to build; raise UsageError if the options are invalid."""
    if image not in (*images.IMAGES, BOTH):
        raise UsageError(f"--image {image!r} is unknown{nearest(image, (*images.IMAGES, BOTH))}")
    if image == BOTH and against:
        raise UsageError(f"--against {against!r} is one image; say which one it is: --image train or tensorboard")
    return images.IMAGES if image == BOTH else (image,)


def reproduce_image(image: str, accelerator: str, against: str, sh: Callable[[str], object]) -> ImageComparison:
    """Build an image from scratch, twice, or once to compare it with an existing image."""
    called = images.image_name(image, accelerator)
    engine.demand("building an image")
    other = _inspect(against, against) if against else None  # before the build, which takes minutes
    base = images.default_base()
    for command in images.base_commands() if base.missing else []:
        sh(command)

    def built(name: str) -> Contents:
        """Build an image; afterwards remove its tag, and the image unless it has another tag."""
        tag = f"{TAG}:{secrets.token_hex(4)}"
        sh(images.build_command(image, accelerator, base, "--no-cache", f"--tag={tag}"))
        try:
            return _inspect(tag, name)
        finally:
            sh(shlex.join(["docker", "image", "rm", tag]))

    if other:
        return ImageComparison(called, built("a new build"), other)
    return ImageComparison(called, built("the first build"), built("the second build"))


def _inspect(image: str, name: str) -> Contents:
    asked = "--format=[{{json .RootFS.Layers}}, {{json .Config}}, {{json .Created}}]"
    code, text = engine.ask("image", "inspect", asked, "--", image)
    if code:
        raise UsageError(f"--against {image!r} is not an image on this engine; `docker load` brings it from an archive")
    return Contents(name, *json.loads(text))
