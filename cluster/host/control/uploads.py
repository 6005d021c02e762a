"""The process that mirrors a run in an object store, until the run has ended.

    python -m cluster.host.control.uploads URL RUN_DIR ID

A failed upload is retried with exponential back-off, and affects nothing else. Tasks can write the run folder, so no
link in it is followed, and records are uploaded only if unchanged since this user's commands wrote them: a resumed run
trusts them.
"""

import os
import sys
import time
from pathlib import Path

from cluster.contract.recovery.checkpoint_files import Saved, list_finished
from cluster.contract.run import provenance
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import LivenessMonitor
from cluster.host.launch import mirroring
from cluster.host.launch.mirroring import CHECKPOINTS, EXPORT, INIT, RECORDS, Store, UnfitError, number_of
from cluster.host.launch.teardown import in_progress
from cluster.host.runtime import mirror
from cluster.system import files, processes
from cluster.system.json_files import RECORD_BYTES, write_json
from cluster.system.messages import plain
from cluster.system.waiting import wait_until

POLL_S, MAX_PAUSE_S = 0.5, 60.0
PATIENCE_S = 60.0
"""Seconds without a heartbeat after which to check whether the run is still in progress."""
GIVE_UP_S = 120.0
"""How long a failing upload is retried after the end of the run."""


class Uploader:
    """Uploads new records, checkpoints and the export of a run."""

    def __init__(self, url: str, run: RunFolder, run_id: str) -> None:
        self._url, self._run, self._run_id = url, run, run_id
        self._keep = run.load_config().get("keep_checkpoints", 1)
        self._monitor, self._ended, self._give_up_at, self._error = LivenessMonitor(run), False, float("inf"), ""
        self._store: Store | None = None
        self._mirrored: set[str] = set()
        self._unfit: set[str] = set()
        """Checkpoints that were damaged or deleted before they were uploaded."""
        self._written_at: list[int] = []
        """The modification times of the records in the mirror."""
        self._reported: mirror.Upload | None = None

    def main(self) -> None:
        """Upload until the mirror of a run that has ended is complete, or cannot be completed."""
        pause_s = POLL_S
        while self._run.cluster.exists():
            self._notice_end()
            ended, before, self._error = self._ended, self._error, ""
            try:
                self.upload(ended=ended)
            except Exception as error:  # of the store's client, or due to a damaged folder
                self._store, self._error = None, plain(" ".join(str(error).split()))
                if not before:
                    self._run.event("chief", "mirror failed", cause=self._error)
            self._report(complete=ended and not self._error)
            if (ended and not self._error) or time.monotonic() > self._give_up_at:
                return
            pause_s = min(2 * pause_s, MAX_PAUSE_S) if self._error else POLL_S
            wait_until(self._notice_end, pause_s, POLL_S)

    def upload(self, *, ended: bool) -> None:
        """Upload new files, and delete those that the run no longer keeps; after its end, upload its export, too."""
        if self._store is None:
            store = Store(self._url, self._run.name)
            for bundle in store.list_bundles(run_id=self._run_id, complete=False):
                store.remove(bundle)  # leftovers of a killed upload
            self._mirrored = set(store.list_bundles(run_id=self._run_id))
            self._store = store
        if self._run.init.is_dir() and not self._of_kind(INIT):  # before any checkpoint, which is useless without them
            self._replace(self._store, INIT, 0, self._run.init)
        try:
            self._upload_records(self._store)
        finally:  # even if the records are not trusted
            for saved in list_finished(self._run.checkpoints)[: self._keep]:
                self._upload_checkpoint(self._store, saved)
        if ended and self._run.export.is_dir():
            self._replace(self._store, EXPORT, max(self._run.saved_steps, default=0), self._run.export)

    def _notice_end(self) -> bool:
        """Return whether the run has ended since the last call."""
        if self._ended:
            return False
        self._monitor.look()
        self._ended = self._run.load_summary() is not None or not self._run.cluster.exists()
        if not self._ended and self._monitor.silence_s > PATIENCE_S:
            self._monitor = LivenessMonitor(self._run)  # query the engine or scheduler again only after as long
            self._ended = not in_progress(self._run)
        self._give_up_at = time.monotonic() + GIVE_UP_S if self._ended else float("inf")
        return self._ended

    def _upload_records(self, store: Store) -> None:
        """Upload the records if one has changed: from a copy that no task can change, once that copy is trusted."""
        paths = {name: self._run.path / name for name in mirroring.RECORD_NAMES if (self._run.path / name).exists()}
        written_at = [path.lstat().st_mtime_ns for path in paths.values()]
        if written_at == self._written_at:
            return
        with files.scratch_folder() as scratch:
            copy = RunFolder(scratch / self._run.name)
            (copy.path / "control").mkdir(parents=True)
            for name, path in paths.items():
                (copy.path / name).write_bytes(files.read_start(path, RECORD_BYTES))
            provenance.check_trusted(copy)
            versions = [number_of(bundle) for bundle in self._of_kind(RECORDS)]
            self._replace(store, RECORDS, max(versions, default=0) + 1, copy.path)
        self._written_at = written_at

    def _upload_checkpoint(self, store: Store, saved: Saved) -> None:
        try:
            described = {name: file for name, file in saved.files.items() if mirroring.CHECKPOINT_FILE.fullmatch(name)}
            bundle = mirroring.name_bundle(CHECKPOINTS, saved.step, self._run_id, described)
        except (OSError, ValueError):  # its record was just deleted, or is damaged
            return
        if bundle not in self._mirrored | self._unfit:
            try:
                store.put(bundle, described, saved.folder)
                self._mirrored.add(bundle)
            except UnfitError as error:
                self._unfit.add(bundle)
                print(f"checkpoint of step {saved.step} is not uploaded: {error}", flush=True)
            self._report()
        if bundle in self._mirrored and saved.step == max(self._run.saved_steps, default=0):
            others = self._of_kind(CHECKPOINTS) - {bundle}
            earlier = sorted((other for other in others if number_of(other) < saved.step), key=number_of)
            self._remove(store, others - set(earlier[max(0, len(earlier) - self._keep + 1) :]))

    def _replace(self, store: Store, kind: str, number: int, folder: Path) -> None:
        files.refuse_links(folder)
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        described = {str(path.relative_to(folder)): (path.stat().st_size, files.sha256(path)) for path in paths}
        bundle = mirroring.name_bundle(kind, number, self._run_id, described)
        if bundle not in self._mirrored:
            store.put(bundle, described, folder)
            self._mirrored.add(bundle)
        self._remove(store, self._of_kind(kind) - {bundle})

    def _remove(self, store: Store, bundles: set[str]) -> None:
        for bundle in bundles:
            store.remove(bundle)
        self._mirrored -= bundles

    def _of_kind(self, kind: str) -> set[str]:
        return {bundle for bundle in self._mirrored if bundle.startswith(f"{kind}/")}

    def _report(self, *, complete: bool = False) -> None:
        steps = [number_of(bundle) for bundle in self._of_kind(CHECKPOINTS)]
        text = f"{self._url.partition('?')[0]}: " + (f"checkpoint of step {max(steps)}" if steps else "no checkpoint")
        text += " and the export" if self._of_kind(EXPORT) else ""
        text += f"; the last upload failed: {self._error}" if self._error else ""
        upload = mirror.Upload(id=self._run_id, process=processes.identity(os.getpid()), text=text, complete=complete)
        if upload != self._reported:
            write_json(self._run.outside(mirror.RECORD), upload.to_json())
            self._reported = upload


if __name__ == "__main__":
    os.nice(10)
    Uploader(sys.argv[1], RunFolder(Path(sys.argv[2])), sys.argv[3]).main()
