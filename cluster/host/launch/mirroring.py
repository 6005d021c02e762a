"""The mirror of a run in an object store: its layout, the check that it is writable, and fetching a run from it.

A store has bundles of files, each with a manifest that is written last and deleted first:

    RUN/records/3-<id>-<digest>/config.json, ...             RUN/records/3-<id>-<digest>.json
    RUN/checkpoints/200-<id>-<digest>/ckpt-200.index, ...    RUN/checkpoints/200-<id>-<digest>.json
    RUN/export/938-<id>-<digest>/saved_model.pb, ...         RUN/export/938-<id>-<digest>.json
    RUN/init/0-<id>-<digest>/weights.npz, ...                RUN/init/0-<id>-<digest>.json

A bundle without its manifest does not count, so an upload can be killed at any time. The bundle's name has the
identifier of its run, so that no run deletes another's, and a digest of its files, so that another state of the same
step replaces it only once that one is complete.
"""

import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from cluster.contract import spec
from cluster.contract.recovery.checkpoint_files import Saved, find_newest_good, write_checkpoint
from cluster.contract.run import claim, provenance
from cluster.contract.run.folder import RunFolder
from cluster.host.launch.folders import runs_dir
from cluster.host.launch.teardown import in_progress
from cluster.host.options.request import Request
from cluster.host.runtime import mirror
from cluster.system.errors import ClusterError, PrerequisiteError, UsageError
from cluster.system.files import open_file, remove, scratch_folder
from cluster.system.messages import plain
from cluster.system.terminal import print_lines

RECORDS, CHECKPOINTS, EXPORT, INIT = KINDS = ("records", "checkpoints", "export", "init")
CHUNK_BYTES = 4 * 2**20
GCS_RETRY = "retry_limit_seconds"
"""The URL parameter that limits how long Google's client retries, by default 15 minutes."""
RECORD_NAMES = (
    *("config.json", "cluster.json", "compose.json", "environment.json", "manifest.json", "stages.json"),
    *("summary.json", "README.md", "control/started.json", "control/tensorboard.json", "control/data.json"),
)
"""The records in a mirror: those that are needed to resume a run, and its result."""
CHECKPOINT_FILE = re.compile(r"ckpt-\d+(?:\+\d+)?\.(?:index|data-[\w-]+)")
_INIT_FILE = re.compile(r"[^/]+\.[\w-]+")
_RECORD = re.compile("|".join(map(re.escape, RECORD_NAMES)))
_BUNDLE = re.compile(r"\w+/\d{1,15}-[0-9a-f]{16}-[0-9a-f]{16}")
Files = dict[str, tuple[int, str]]
"""The size in bytes and the sha256 of each file, by its path in a folder."""


class UnfitError(Exception):
    """Files are missing or do not match their manifest."""


def number_of(bundle: str) -> int:
    """Return the step of a bundle, or the version of a bundle of records."""
    return int(bundle.rpartition("/")[2].partition("-")[0])


def name_bundle(kind: str, number: int, run_id: str, files: Files) -> str:
    """Return the name of the bundle with these files, see the module."""
    digest = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()
    return f"{kind}/{number}-{run_id}-{digest[:16]}"


class Store:
    """The folder of a run in a store. Every method raises OSError if the store refuses or does not answer."""

    def __init__(self, url: str, name: str) -> None:
        if url.startswith("gs:") and GCS_RETRY not in url:
            url += f"{'&' if '?' in url else '?'}{GCS_RETRY}=20"
        from pyarrow import fs  # here, as the import takes 0.3 s and only mirrors need it

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
        """Return the complete bundles of `kinds` and a run, by default of all, newest first; or the incomplete ones."""
        selections = [self._select(kind, allow_not_found=True) for kind in kinds or KINDS]
        paths = {entry.path for selection in selections for entry in self._files.get_file_info(selection)}
        finished = {path.removesuffix(".json") for path in paths if path.endswith(".json")}
        listed = finished if complete else paths - finished
        bundles = [path for path in listed if _BUNDLE.fullmatch(path) and run_id in path]
        return sorted(bundles, key=number_of, reverse=True)

    def put(self, bundle: str, files: Files, source: Path) -> None:
        """Upload files of the folder `source`, then their manifest; raise UnfitError if one was deleted or changed."""
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
                    raise UnfitError(f"{name!r} is not the name of a file of such a bundle")
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
        """Write a small file atomically, as object stores always do."""
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


def locate_mirror(request: Request) -> Request:
    """Return a request without credentials; split a URL in `--resume` into the mirror's URL and the run's name."""
    url, name = request.mirror, request.resume
    if "://" in name:
        folder, mark, query = mirror.take_credentials(name).partition("?")
        url, _, name = folder.rpartition("/")
        url += mark + query
    return replace(request, mirror=mirror.take_credentials(url) if url not in ("", mirror.NONE) else url, resume=name)


def check_mirror(url: str, name: str, run_id: str) -> None:
    """Check that a run can write to its mirror, and that the mirror has no other run of the same name.

    Raises:
        PrerequisiteError: the store refuses or does not answer.
        UsageError: the mirror has another run of that name.
    """
    with _reaching(url):
        store = Store(url, name)
        store.try_writing()
        others = [bundle for bundle in store.list_bundles() if run_id not in bundle]
    if others:
        raise UsageError(f"--mirror {url} has another run {name!r}; choose another --name, or a mirror without it")


def fetch_run(request: Request) -> None:
    """Fetch the run to resume, and trust it, if it is missing here or its checkpoint here is older than the mirror's.

    The fetched records are trusted like those of a run that this user started, because the command names the mirror.

    Raises:
        PrerequisiteError: the store refuses or does not answer.
        UsageError: there is no such run, or another user has started the run on this machine.
    """
    url = request.mirror
    if not request.resume or url in ("", mirror.NONE):
        return
    run = RunFolder(runs_dir() / spec.check_run_name(request.resume))
    with claim.hold_claim(run, "fetched"), _reaching(url):
        exists, run_id, held = run.cluster.exists() and not run.incomplete, "", -1
        if exists:
            if in_progress(run) or not (run_id := run.started.mirror_id):
                return
            if not request.trust:
                provenance.check_trusted(run)
            newest = find_newest_good(run.checkpoints, lambda line: None)
            held = newest.step if newest else held
        store = Store(url, run.name)
        checkpoints = [each for each in store.list_bundles(CHECKPOINTS, run_id=run_id) if number_of(each) > held]
        records = store.list_bundles(RECORDS, run_id=run_id)
        if exists and not (checkpoints and records):
            return
        if not records:
            raise UsageError(f"--resume {run.name}: there is no such run in {url}, nor in {runs_dir()}")
        print_lines(f"fetching {run.name} from {url}")
        if not exists:
            if run.path.exists() and not run.incomplete:
                raise UsageError(f"--resume {run.name}: {run.path} is not a run; move it away")
            run.delete()
            run.path.mkdir(parents=True)
            run.unfinished.touch()
        run.create()
        provenance.note_rewriting(run)
        init = [] if exists else store.list_bundles(INIT, run_id=run_id)  # every start loads them, before a checkpoint
        if init and not _fetch_first_intact(init, lambda bundle: store.get(bundle, run.init, _INIT_FILE)):
            raise PrerequisiteError(f"--resume {run.name}: its first weights in {url} are damaged; restore them there")
        if not _fetch_first_intact(records, lambda bundle: _fetch_records(store, bundle, run)):
            raise PrerequisiteError(f"--resume {run.name}: {url} has no intact records of it; restore them there")
        fetched = _fetch_first_intact(checkpoints, lambda bundle: _fetch_checkpoint(store, bundle, run))
        provenance.write_note(run)
        remove(run.unfinished)
    print_lines(f"fetched the checkpoint of step {number_of(fetched)}" if fetched else "fetched no checkpoint")


def _fetch_first_intact(bundles: list[str], fetch: Callable[[str], None]) -> str:
    """Fetch the first intact bundle and return its name, or an empty string; print a warning for each damaged one."""
    for bundle in bundles:
        try:
            fetch(bundle)
        except UnfitError as error:
            print_lines(f"warning: {bundle} in the mirror is damaged ({error}); using the previous one")
        else:
            return bundle
    return ""


def _fetch_records(store: Store, bundle: str, run: RunFolder) -> None:
    with scratch_folder() as scratch:
        store.get(bundle, scratch, _RECORD)
        for path in [path for path in scratch.rglob("*") if path.is_file()]:
            with open_file(run.path / path.relative_to(scratch), "wb") as file:
                file.write(path.read_bytes())


def _fetch_checkpoint(store: Store, bundle: str, run: RunFolder) -> None:
    def write(prefix: str) -> None:
        folder = Path(prefix).parent
        store.get(bundle, folder, CHECKPOINT_FILE)
        for path in list(folder.iterdir()):  # the prefix may differ, if this step has been saved before
            path.rename(prefix + path.name[path.name.index(".") :])

    write_checkpoint(write, Saved(run.checkpoints, number_of(bundle)))


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[None]:
    try:
        yield
    except ClusterError:
        raise
    except ValueError as error:  # a parameter of the URL
        raise UsageError(f"--mirror {url}: {plain(' '.join(str(error).split()))}") from error
    except OSError as error:
        fix = f"check its address and your credentials, or leave it out (a run that has one: --mirror {mirror.NONE})"
        why = plain(" ".join(str(error).split()))
        raise PrerequisiteError(f"--mirror {url} cannot be used: {why}; {fix}") from error
