"""The mirror of a run before it starts: whether the store takes it, and a run of which this machine has less."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from cluster.contract import spec
from cluster.contract.recovery.checkpoint_files import Saved, find_newest_good, write_checkpoint
from cluster.contract.run import claim, provenance
from cluster.contract.run.folder import RunFolder
from cluster.host.launch.folders import runs_dir
from cluster.host.launch.mirror_store import CHECKPOINTS, RECORDS, Store, UnfitError, number_of
from cluster.host.launch.teardown import in_progress
from cluster.host.options.request import Request
from cluster.host.runtime import mirror
from cluster.system import files
from cluster.system.errors import ClusterError, PrerequisiteError, UsageError
from cluster.system.messages import plain
from cluster.system.terminal import print_lines

RECORD_NAMES = (
    *("config.json", "cluster.json", "compose.json", "environment.json", "manifest.json", "stages.json"),
    *("summary.json", "README.md", "control/started.json", "control/tensorboard.json"),
)
"""The records that a mirror has: those from which a run is resumed, and its result."""
CHECKPOINT_FILE = re.compile(r"ckpt-\d+(?:\+\d+)?\.(?:index|data-[\w-]+)")
_RECORD = re.compile("|".join(map(re.escape, RECORD_NAMES)))


def locate_mirror(request: Request) -> Request:
    """Return a request without credentials; a URL to resume is that of a mirror, with the run's name behind it."""
    url, name = request.mirror, request.resume
    if "://" in name:
        folder, mark, query = mirror.take_credentials(name).partition("?")
        url, _, name = folder.rpartition("/")
        url += mark + query
    return replace(request, mirror=mirror.take_credentials(url) if url not in ("", mirror.NONE) else url, resume=name)


def check_mirror(url: str, name: str, run_id: str) -> None:
    """Check that a run can write to its mirror, and that no other run of its name has.

    Raises:
        PrerequisiteError: the store does not answer, or refuses.
        UsageError: another run has.
    """
    with _reaching(url):
        store = Store(url, name)
        store.try_writing()
        others = [bundle for bundle in store.list_bundles() if run_id not in bundle]
    if others:
        raise UsageError(f"--mirror {url} has another run {name!r}; choose another --name, or a mirror without it")


def fetch_run(request: Request) -> None:
    """Fetch the run to resume if its mirror has a newer checkpoint than this machine, or this machine nothing of it.

    Its records are trusted as if this user had started it here, because the command names the mirror.

    Raises:
        PrerequisiteError: the store does not answer, or refuses.
        UsageError: there is no such run, or the one here was not started by this user.
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
        if not _fetch_first_intact(records, lambda bundle: _fetch_records(store, bundle, run)):
            raise PrerequisiteError(f"--resume {run.name}: {url} has no intact records of it; restore them there")
        fetched = _fetch_first_intact(checkpoints, lambda bundle: _fetch_checkpoint(store, bundle, run))
        provenance.write_note(run)
        files.remove(run.unfinished)
    print_lines(f"fetched the checkpoint of step {number_of(fetched)}" if fetched else "fetched no checkpoint")


def _fetch_first_intact(bundles: list[str], fetch: Callable[[str], None]) -> str:
    """Fetch the first intact one of some bundles and return it; print a line for each that is skipped."""
    for bundle in bundles:
        try:
            fetch(bundle)
        except UnfitError as error:
            print_lines(f"warning: {bundle} in the mirror is damaged ({error}); using the one before")
        else:
            return bundle
    return ""


def _fetch_records(store: Store, bundle: str, run: RunFolder) -> None:
    with files.scratch_folder() as scratch:
        store.get(bundle, scratch, _RECORD)
        for path in [path for path in scratch.rglob("*") if path.is_file()]:
            with files.open_file(run.path / path.relative_to(scratch), "wb") as file:
                file.write(path.read_bytes())


def _fetch_checkpoint(store: Store, bundle: str, run: RunFolder) -> None:
    def write(prefix: str) -> None:
        folder = Path(prefix).parent
        store.get(bundle, folder, CHECKPOINT_FILE)
        for path in list(folder.iterdir()):  # another save of the step may have had their names
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
        raise PrerequisiteError(
            f"--mirror {url} cannot be used: {plain(' '.join(str(error).split()))}; check its address and your "
            f"credentials, or leave it out (a run that has one: --mirror {mirror.NONE})"
        ) from error
