"""What a run has in an object store: bundles of files, each with a manifest that is written last and deleted first.

    RUN/records/3-<id>-<digest>/config.json, ...             RUN/records/3-<id>-<digest>.json
    RUN/checkpoints/200-<id>-<digest>/ckpt-200.index, ...    RUN/checkpoints/200-<id>-<digest>.json
    RUN/export/938-<id>-<digest>/saved_model.pb, ...         RUN/export/938-<id>-<digest>.json

A bundle without its manifest does not exist, so an upload can be killed at any time. Its name has the identifier of the
run that wrote it, which deletes no other, and a digest of its files: another state of the same step replaces it only
once that is complete itself.
"""

import hashlib
import json
import re
import secrets
from pathlib import Path
from typing import IO, Any

from cluster.system.files import open_file

RECORDS, CHECKPOINTS, EXPORT = KINDS = ("records", "checkpoints", "export")
CHUNK_BYTES = 4 * 2**20
GCS_RETRY = "retry_limit_seconds"
"""A parameter: how long Google's client tries again by itself, 15 minutes by default."""
_BUNDLE = re.compile(r"\w+/\d{1,15}-[0-9a-f]{16}-[0-9a-f]{16}")

Files = dict[str, tuple[int, str]]
"""The size in bytes and the sha256 of each file, by its name in a folder."""


class UnfitError(Exception):
    """Files that are missing, or not those of the manifest."""


def number_of(bundle: str) -> int:
    """Return the step of a bundle, or the version of records."""
    return int(bundle.rpartition("/")[2].partition("-")[0])


def name_bundle(kind: str, number: int, run_id: str, files: Files) -> str:
    """Return the name of a bundle with these files."""
    digest = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()
    return f"{kind}/{number}-{run_id}-{digest[:16]}"


class Store:
    """The folder of a run in a store. Each method raises OSError where the store refuses or does not answer."""

    def __init__(self, url: str, name: str) -> None:
        if url.startswith("gs:") and GCS_RETRY not in url:
            url += f"{'&' if '?' in url else '?'}{GCS_RETRY}=20"
        from pyarrow import fs  # here: the import takes 0.3 s, which commands without a mirror do not need

        base, path = fs.FileSystem.from_uri(url)
        self._select, self._missing = fs.FileSelector, fs.FileType.NotFound
        self._is_local = base.type_name == "local"
        self._files = fs.SubTreeFileSystem(f"{path}/{name}", base)

    def try_writing(self) -> None:
        """Write and delete a small file."""
        name = f"{RECORDS}/.write-test-{secrets.token_hex(8)}"
        self._write(name, b"tf-cluster")
        self._files.delete_file(name)

    def list_bundles(self, *kinds: str, run_id: str = "", complete: bool = True) -> list[str]:
        """Return the bundles of some kinds or all, and of one run or all, newest first; or those without a manifest."""
        selections = [self._select(kind, allow_not_found=True) for kind in kinds or KINDS]
        paths = {entry.path for selection in selections for entry in self._files.get_file_info(selection)}
        finished = {path.removesuffix(".json") for path in paths if path.endswith(".json")}
        listed = finished if complete else paths - finished
        bundles = [path for path in listed if _BUNDLE.fullmatch(path) and run_id in path]
        return sorted(bundles, key=number_of, reverse=True)

    def put(self, bundle: str, files: Files, source: Path) -> None:
        """Upload files of a folder, and then their manifest; raise UnfitError if one was deleted or changed."""
        for name, expected in files.items():
            try:
                file = open_file(source / name, "rb")
            except OSError as error:
                raise UnfitError(f"{name}: {error.strerror}") from error
            with file, self._open(f"{bundle}/{name}") as target:
                if _copy(file, target) != expected:
                    raise UnfitError(f"{name} has changed since it was saved")
        described = {name: {"size_bytes": size, "sha256": digest} for name, (size, digest) in files.items()}
        self._write(f"{bundle}.json", json.dumps({"files": described}).encode())

    def get(self, bundle: str, folder: Path, allowed: re.Pattern[str]) -> None:
        """Fetch the files of a bundle; raise UnfitError if one is missing or damaged, or its name is not allowed."""
        try:
            with self._files.open_input_stream(f"{bundle}.json") as manifest:
                files = json.loads(manifest.read())["files"]
            for name, expected in files.items():
                if not allowed.fullmatch(name):
                    raise UnfitError(f"{name!r} is not the name of such a file")
                (folder / name).parent.mkdir(exist_ok=True)
                with self._files.open_input_stream(f"{bundle}/{name}") as source, (folder / name).open("wb") as target:
                    if _copy(source, target) != (expected["size_bytes"], expected["sha256"]):
                        raise UnfitError(f"{name} has changed since it was uploaded")
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnfitError(f"{type(error).__name__}: {error}") from error

    def remove(self, bundle: str) -> None:
        """Delete a bundle, its manifest first."""
        for delete, path in ((self._files.delete_file, f"{bundle}.json"), (self._files.delete_dir, bundle)):
            if self._files.get_file_info(path).type != self._missing:
                delete(path)

    def _open(self, path: str) -> Any:
        if self._is_local:  # object stores have no folders
            self._files.create_dir(path.rpartition("/")[0])
        return self._files.open_output_stream(path)

    def _write(self, path: str, content: bytes) -> None:
        """Write a small file, which shows whole or not at all, as object stores do by themselves."""
        scratch = f"{path}.part" if self._is_local else path
        with self._open(scratch) as file:
            file.write(content)
        if self._is_local:
            self._files.move(scratch, path)


def _copy(source: IO[bytes], target: IO[bytes]) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
        target.write(chunk)
    return size, digest.hexdigest()
