"""What is made of syft's document: hashes from the image's own files, and nothing that the image does not determine."""

import hashlib
import json
import re
from typing import Any

import pytest

from cluster.host.image import contents, engine, images, sbom
from cluster.host.image.engine import Answer
from cluster.system.errors import EXIT_PREREQUISITE
from tests.support.command_line import refusal
from tests.support.saved_image import archive

Json = dict[str, Any]
SITE = "/opt/venv/lib/python3.11/site-packages"
FILES = {
    "/var/lib/dpkg/status": b"Package: bash",
    "/var/lib/dpkg/info/bash.list": b"/bin/bash",
    "/var/lib/dpkg/info/bash.md5sums": b"0  bin/bash",
    "/var/lib/dpkg/info/meta.list": b"/.",
    f"{SITE}/x-1.dist-info/METADATA": b"Name: x",
    f"{SITE}/x-1.dist-info/RECORD": b"x.py,,",
    "/usr/local/bin/python3.11": b"ELF",
}


def package(kind: str, name: str, *paths: str, layer: str = "") -> Json:
    properties = {"syft:package:type": kind, "syft:package:foundBy": "a cataloger"}
    for number, path in enumerate(paths):
        properties |= {f"syft:location:{number}:layerID": layer, f"syft:location:{number}:path": path}
    listed = [{"name": key, "value": value} for key, value in properties.items()]
    purl = f"pkg:{kind}/{name}@1"
    found = {"bom-ref": f"{purl}?id=0", "type": "library", "name": name, "version": "1", "purl": purl}
    return found | {"properties": listed}


@pytest.fixture
def image(tmp_path) -> contents.Image:
    read = contents.read(archive(tmp_path / "x.tar", [{path[1:]: {"data": data} for path, data in FILES.items()}]))
    read.config["created"] = "2026-11-21T12:03:15Z"
    return read


def document(image: contents.Image, number: str = "1") -> Json:
    """Return the document of syft about the image; each time with another number and time."""
    layer = image.layers[0].digest
    bash = [f"/var/lib/dpkg/{name}" for name in ("info/bash.list", "info/bash.md5sums", "status")]
    wheel = [f"{SITE}/x-1.dist-info/{name}" for name in ("METADATA", "RECORD")]
    components = [
        {"bom-ref": "os", "type": "operating-system", "name": "debian", "version": "12"},
        package("python", "x", *wheel, layer=layer),
        package("deb", "meta", "/var/lib/dpkg/info/meta.list", "/var/lib/dpkg/status", layer=layer),
        package("deb", "bash", *bash, layer=layer),
        package("binary", "python", "/usr/local/bin/python3.11", layer=layer),
        package("python", "lost", "/nowhere/RECORD", layer=layer),
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
        "metadata": {"timestamp": number, "tools": {}, "component": {"bom-ref": number, "name": "/tmp/image.tar"}},
        "components": components,
    }


def test_a_package_must_have_the_hash_of_the_file_that_stands_for_it(image):
    made = sbom.complete(document(image), "tf-cluster/train:cpu", image)
    found = {}
    for component in made["components"]:
        (path,) = [each["value"] for each in component.get("properties", ()) if each["name"] == sbom.HASH_OF] or [""]
        assert bool(path) == ("hashes" in component)
        if path:
            assert [{"alg": "SHA-256", "content": hashlib.sha256(FILES[path]).hexdigest()}] == component["hashes"]
            found[component["name"]] = path
    assert {
        "bash": "/var/lib/dpkg/info/bash.md5sums",
        "meta": "/var/lib/dpkg/info/meta.list",
        "x": f"{SITE}/x-1.dist-info/RECORD",
        "python": "/usr/local/bin/python3.11",
    } == found


def test_the_same_image_must_give_the_same_bytes(image):
    first, second = (
        json.dumps(sbom.complete(document(image, number), "tf-cluster/train:cpu", image)) for number in "12"
    )
    assert first == second
    made = json.loads(first)
    assert "2026-11-21T12:03:15Z" == made["metadata"]["timestamp"]
    assert ("tf-cluster/train:cpu", image.id) == tuple(
        made["metadata"]["component"][key] for key in ("name", "version")
    )
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", made["serialNumber"])
    assert made["serialNumber"] != sbom.complete(document(image), "another:1", image)["serialNumber"]


def test_what_is_missing_must_be_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "probe", lambda: Answer(True, "Docker Engine 0"))
    monkeypatch.setattr(engine, "ask", lambda *words, **_: (1, "No such image"))
    for named in ("invoke image.build", "make setup"):
        code, message = refusal("image.sbom", output=str(tmp_path / "x"))
        assert EXIT_PREREQUISITE == code
        assert named in message
        monkeypatch.setattr(images, "inspect", lambda name: {})
        monkeypatch.setattr(sbom.importlib.util, "find_spec", lambda name: None)
