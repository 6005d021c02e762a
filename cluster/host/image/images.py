"""The images: names, inputs, the check that they are current, the commands that build them, and reproduction.

`invoke image.reproduce` rebuilds an image from scratch and compares it layer by layer. Two images with the same
configuration, date and layer hashes are identical. Ids are not compared, since engines compute them differently. Both
builds have separate tags, which are removed afterwards, so that no image in use is changed.
"""

import itertools
import json
import os
import re
import secrets
import shlex
import shutil
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster.host.image import checkout, engine
from cluster.system.errors import PrerequisiteError, UsageError, nearest
from cluster.system.files import ROOT, files_sha256
from cluster.system.messages import COMMAND, counted, last_output_line

ACCELERATORS = ("cpu", "gpu")
PYTHON = "3.11"
IMAGES = ("train", "tensorboard")
"""The images, named like their stages of the Dockerfile."""
PYTHON_BASE = "python:3.11-slim-bookworm"
DEBIAN_BASE = "tf-cluster/base:bookworm"
"""Replaces `PYTHON_BASE` if no image can be pulled: built on this machine from Debian's packages."""
INPUTS_LABEL = "tf-cluster.inputs"
"""The label with a hash of an image's inputs: as long as these are unchanged, `up` does not rebuild the image."""
_OCI = "org.opencontainers.image."
REGISTRY_TIMEOUT_S = 20.0
_REFERENCE = r"[A-Za-z0-9][A-Za-z0-9._:/@-]*"
_BASE_TAR = ".build/base.tar"
_CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
BOTH = "both"
TAG = "tf-cluster/reproduction"


@dataclass(frozen=True)
class Base:
    """The base image of the others."""

    name: str
    digest: str = ""
    """The image's digest in a registry; empty for an image that was built on this machine."""
    layers: tuple[str, ...] = ()
    """The hashes of the image's layers, if this engine has it."""
    missing: bool = False
    """Whether `base_commands` must run first."""


def image_name(image: str, accelerator: str = "") -> str:
    """Return the name of one of `IMAGES`; its prefix is IMAGE_NAMESPACE, or `tf-cluster`."""
    if image == "train" and accelerator not in ACCELERATORS:
        raise UsageError(f"accelerator {accelerator!r} has no image{nearest(accelerator, ACCELERATORS)}")
    tag = accelerator if image == "train" else "latest"
    return f"{os.environ.get('IMAGE_NAMESPACE') or 'tf-cluster'}/{image}:{tag}"


def train_image(accelerator: str) -> str:
    """Return the name of the tasks' image."""
    return image_name("train", accelerator)


def default_base(requested: str = "") -> Base:
    """Return the base image: the requested one, $BASE_IMAGE, or else the first of the following that exists.

    Images on this engine come first, so that a machine without a registry waits for one only once; then the official
    Python image, pinned to the current digest of its tag; then a Debian base that `base_commands` builds.
    """
    requested = requested or os.environ.get("BASE_IMAGE", "")
    if requested and not re.fullmatch(_REFERENCE, requested):
        raise UsageError(f"base image {requested!r}: expected an image's name, such as {PYTHON_BASE}; or name none")
    for name in [requested] if requested else [PYTHON_BASE, DEBIAN_BASE]:
        if found := _on_engine(name):
            return found
    name = requested or PYTHON_BASE
    words = ("buildx", "imagetools", "inspect", "--format={{.Manifest.Digest}}", name)
    code, answer = engine.ask(*words, timeout_s=REGISTRY_TIMEOUT_S)
    if code == 0:
        return Base(f"{name.partition('@')[0]}@{answer}", answer)
    reason = last_output_line(answer)
    if requested:
        where = f"is neither on this engine nor in a registry that answers ({reason})"
        raise PrerequisiteError(f"base image {requested} {where}; name one with Python 3.11, or none for the default")
    if shutil.which("mmdebstrap") is None:
        why = f"{PYTHON_BASE} cannot be pulled ({reason}), and mmdebstrap, which makes one, is not installed"
        raise PrerequisiteError(f"{why}; install it, or set BASE_IMAGE to an image with Python 3.11")
    return Base(DEBIAN_BASE, missing=True)


def base_commands() -> list[str]:
    """Return the commands that build `DEBIAN_BASE`, reproducibly from the same packages."""
    left_out = ["path-exclude=/usr/share/doc/*", "path-include=/usr/share/doc/*/copyright"]
    left_out += ["path-exclude=/usr/share/man/*", "path-exclude=/usr/share/locale/*"]
    bootstrap = ["mmdebstrap", "--quiet", "--variant=minbase", "--include=python3,python3-venv,ca-certificates"]
    bootstrap += [f"--dpkgopt={rule}" for rule in left_out]
    return [
        f"mkdir -p {Path(_BASE_TAR).parent}",
        f"umask 022 && SOURCE_DATE_EPOCH={checkout.commit_time_s()} {shlex.join([*bootstrap, 'bookworm', _BASE_TAR])}",
        shlex.join(["docker", "import", '--change=CMD ["python3"]', _BASE_TAR, DEBIAN_BASE]),
        f"rm {_BASE_TAR}",
    ]


def build_commands(accelerator: str, base: Base) -> list[str]:
    """Return the commands that build both images, and first a missing base; to be run in the checkout."""
    build = [build_command(image, accelerator, base, f"--tag={image_name(image, accelerator)}") for image in IMAGES]
    return [*(base_commands() if base.missing else []), *build]


def build_command(image: str, accelerator: str, base: Base, *options: str) -> str:
    """Return the command that builds one of `IMAGES`; to be run in the checkout."""
    labels = _labels(base) | {INPUTS_LABEL: inputs_sha256(base)}
    words = ["docker", "build", "--file=docker/Dockerfile"]
    # BuildKit uses it as the image's date, so that the same commit on the same base makes the same image.
    words += [f"--build-arg=BASE_IMAGE={base.name}", f"--build-arg=SOURCE_DATE_EPOCH={checkout.commit_time_s()}"]
    # Without a value: passed on from the environment, and neither printed nor kept in the image.
    words += [f"--build-arg={proxy}" for proxy in _PROXIES if proxy in os.environ]
    words += [f"--build-arg=ACCELERATOR={accelerator}"] if image == "train" else []
    words += [f"--label={key}={value}" for key, value in labels.items()]
    bundle = os.environ.get("SSL_CERT_FILE", _CA_BUNDLE)  # the certificate authorities of this machine
    if Path(bundle).is_file():
        quoted = bundle.replace('"', '""')  # the engine reads the value as a line of CSV
        words += [f'--secret=id=ca,"src={quoted}"' if set(',"\r\n') & set(bundle) else f"--secret=id=ca,src={bundle}"]
    return shlex.join([*words, f"--target={image}", *options, "."])


def inputs_sha256(base: Base) -> str:
    """Return a hash of all current inputs of images: files, base, date and labels.

    It is the same for all images and accelerators. Of a file's mode, only the executable bit counts, which git keeps;
    the build sets the rest.
    """
    settings = [json.dumps(_labels(base)), *([] if base.digest else base.layers)]
    files = [ROOT / "docker" / "Dockerfile", *_context()]
    names = [str(path.relative_to(ROOT)) for path in files]
    programs = [name for name, path in zip(names, files, strict=True) if path.stat().st_mode & stat.S_IXUSR]
    return files_sha256(ROOT, names, "\0".join([*settings, *programs]).encode())


def are_current(accelerator: str) -> bool:
    """Return whether this engine has both images, current and on the same base: $BASE_IMAGE, if that is set."""
    names = [image_name(image, accelerator) for image in IMAGES]
    code, text = engine.ask("image", "inspect", "--format={{json .Config.Labels}}", *names)
    labels = [json.loads(line) or {} for line in text.splitlines()] if code == 0 else [{}]
    recorded = [labels[0].get(f"{_OCI}base.{key}", "") for key in ("name", "digest")]
    requested, _, requested_digest = os.environ.get("BASE_IMAGE", "").partition("@")
    if not recorded[0] or requested not in ("", recorded[0]) or requested_digest not in ("", recorded[1]):
        return False
    base = Base(*recorded) if recorded[1] else _on_engine(recorded[0])
    return base is not None and {each.get(INPUTS_LABEL) for each in labels} == {inputs_sha256(base)}


def _on_engine(name: str) -> Base | None:
    code, text = engine.ask("image", "inspect", "--format=[{{json .RepoDigests}}, {{json .RootFS.Layers}}]", name)
    if code:
        return None
    digests, layers = json.loads(text)
    return Base(name, digests[0].partition("@")[2] if digests else "", tuple(layers))


def _context() -> list[Path]:
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    tops = [path for rule in rules if rule.startswith("!") for path in ROOT.glob(rule[1:])]
    inside = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*"))]
    return sorted(path for path in inside if path.is_file() and "__pycache__" not in path.parts)


def _labels(base: Base) -> dict[str, str]:
    """Return the OCI labels that are known only at build time; the Dockerfile has the others."""
    labels = {
        "revision": checkout.revision(),
        "created": datetime.fromtimestamp(checkout.commit_time_s(), UTC).isoformat(),
        "base.name": base.name.partition("@")[0],
        "base.digest": base.digest,
    }
    return {f"{_OCI}{key}": value for key, value in labels.items() if value}


def inspect_image(image: str) -> dict[str, str]:
    """Return the record of an image for the manifest, with the digest of its base or, without one, of its content."""
    code, text = engine.ask("image", "inspect", "--format={{json .}}", image)
    if code != 0:
        why = last_output_line(text)
        raise PrerequisiteError(f"image {image} is not on this engine ({why}); run `{COMMAND} image.build`")
    details = json.loads(text)
    labels = details["Config"]["Labels"] or {}
    return {
        "image": image,
        "id": details["Id"],
        "revision": labels.get(f"{_OCI}revision", ""),
        "base": labels.get(f"{_OCI}base.name", ""),
        "base_digest": labels.get(f"{_OCI}base.digest", details["RootFS"]["Layers"][0]),
    }


def pending_commands(accelerator: str) -> list[str]:
    """Return the commands that build the images; none if they exist and are current."""
    if are_current(accelerator):
        return []
    commands = build_commands(accelerator, default_base())
    if engine.ask("image", "inspect", *(image_name(image, accelerator) for image in IMAGES))[0] == 0:
        # A rebuild with few changes takes seconds: then only errors are worth printing.
        return [command.replace("docker build", "docker build --quiet", 1) for command in commands]
    return commands


def build_images(sh: Callable[[str], object], accelerator: str = "cpu", *, renew: bool = True) -> None:
    """Build the images that are not current; without `renew`, only if the tasks' image is missing."""
    if not renew and engine.ask("image", "inspect", train_image(accelerator))[0] == 0:
        return
    for command in pending_commands(accelerator):
        sh(command)


@dataclass(frozen=True)
class Contents:
    """The engine's record of an image."""

    name: str
    layers: list[str]
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
        compared = [asdict(self.first), asdict(self.second)]
        return {"image": self.image, "identical": self.identical, "compared": compared, "differing": self.differing}


def choose_images(image: str, against: str) -> tuple[str, ...]:
    """Return the images to build; raise UsageError if the options are invalid."""
    if image not in (*IMAGES, BOTH):
        raise UsageError(f"--image {image!r} is unknown{nearest(image, (*IMAGES, BOTH))}")
    if image == BOTH and against:
        raise UsageError(f"--against {against!r} is one image; say which one it is: --image train or tensorboard")
    return IMAGES if image == BOTH else (image,)


def reproduce_image(image: str, accelerator: str, against: str, sh: Callable[[str], object]) -> ImageComparison:
    """Build an image from scratch, twice, or once to compare it with an existing image."""
    called = image_name(image, accelerator)
    engine.demand("building an image")
    other = _inspect(against, against) if against else None  # before the build, which takes minutes
    base = default_base()
    for command in base_commands() if base.missing else []:
        sh(command)

    def built(name: str) -> Contents:
        """Build an image; afterwards remove its tag, and the image unless it has another tag."""
        tag = f"{TAG}:{secrets.token_hex(4)}"
        sh(build_command(image, accelerator, base, "--no-cache", f"--tag={tag}"))
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
