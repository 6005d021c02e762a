"""Small archives of images, as `docker image save` writes them."""

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

Layer = dict[str, dict[str, Any]]


def packed(files: dict[str, dict[str, Any]], mode: str = "w") -> bytes:
    """Return a tar of these entries: path and what is not as usual."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for path, given in files.items():
            details = {"mode": 0o644, "mtime": 0, **given}
            data = details.pop("data", b"")
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            for name, value in details.items():
                setattr(entry, name, value)
            archive.addfile(entry, io.BytesIO(data))
    return stream.getvalue()


def archive(path: Path, layers: list[Layer], labels: dict[str, str] | None = None, mode: str = "w") -> Path:
    """Write an image's archive as `docker image save` does, its layers packed as `mode` says."""
    tars = [packed(layer) for layer in layers]
    config = {
        "config": {"Labels": labels or {}},
        "history": [{"created": "1970-01-01T00:00:00Z"}],
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in tars]},
    }
    manifest = [{"Config": "config", "Layers": [f"layer{number}" for number in range(len(layers))]}]
    files = {"config": json.dumps(config).encode()}
    files |= {f"layer{number}": packed(layer, mode) for number, layer in enumerate(layers)}
    files |= {"manifest.json": json.dumps(manifest).encode()}
    path.write_bytes(packed({name: {"data": data} for name, data in files.items()}))
    return path
