"""A mirror: its URL, every complete checkpoint in it wherever a kill came, and what it gives back."""

import contextlib
import itertools
import multiprocessing
import os
import random
import secrets
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.contract.recovery.checkpoint_files import Saved, delete_older, find_newest_good, write_checkpoint
from cluster.contract.run import provenance
from cluster.contract.run.folder import RunFolder
from cluster.host.control import uploads
from cluster.host.launch import mirroring, planning, startup
from cluster.host.options.request import Request
from cluster.host.runtime import mirror
from cluster.system.errors import PrerequisiteError, UsageError
from cluster.system.files import sha256
from cluster.system.json_files import read_json, write_json
from cluster.system.ports import free_ports
from tests.support.launching import no_shell
from tests.support.waiting import wait_for

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
ID, KEEP = "0123456789abcdef", 2


@pytest.fixture
def url(tmp_path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def mirrored(make_run, url) -> RunFolder:
    """A run that keeps two checkpoints and has a mirror, to which nothing was uploaded yet."""
    run = make_run()
    write_json(run.config, {"keep_checkpoints": KEEP})
    write_json(run.control / "started.json", {"runtime": "local", "mirror": url, "mirror_id": ID})
    provenance.write_note(run)
    return run


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> RunFolder:
    """The same run on a machine that has nothing of it."""
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "elsewhere"))
    return RunFolder(tmp_path / "elsewhere" / "run")


def save(run: RunFolder, step: int, content: bytes = b"weights") -> None:
    saved = Saved(run.checkpoints, step)
    write_checkpoint(lambda prefix: [Path(prefix + end).write_bytes(content) for end in (".index", ".data-0")], saved)
    delete_older(saved, KEEP)


def upload(run: RunFolder, *, ended: bool = False) -> None:
    uploads.Uploader(run.started.mirror, run, ID).upload(ended=ended)


def fetch(run: RunFolder, url: str) -> int | None:
    """Fetch a run; return the step of its newest checkpoint."""
    mirroring.fetch_run(Request(resume=run.name, mirror=url))
    newest = find_newest_good(run.checkpoints)
    return newest.step if newest else None


def stored(tmp_path: Path, kind: str = "checkpoints") -> list[int]:
    """Return the steps of the bundles in the mirror that have a manifest."""
    return sorted(int(path.name.partition("-")[0]) for path in (tmp_path / "store" / "run" / kind).glob("*.json"))


class Killed(BaseException):
    """The death of the process that uploads."""


class Killing:
    """Wraps a file system, or a file of it, that is killed at a write, a file's in the middle, and writes no more."""

    left = 0

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.wrapped, name)
        self.count(name in ("create_dir", "open_output_stream", "move", "delete_file", "delete_dir"))
        return (lambda path: Killing(found(path))) if name == "open_output_stream" else found

    def __enter__(self) -> "Killing":
        return self

    def __exit__(self, *_: object) -> None:
        self.wrapped.close()

    def write(self, content: bytes) -> None:
        self.wrapped.write(content[: len(content) // 2])
        self.count()
        self.wrapped.write(content[len(content) // 2 :])

    @staticmethod
    def count(writes: int = 1) -> None:
        Killing.left -= writes
        if writes and Killing.left <= 0:
            raise Killed


def upload_until(run: RunFolder, write: int) -> bool:
    """Upload until the process is killed at a write; return whether it was done before."""
    prepare, Killing.left = mirroring.Store.__init__, write

    def wrap(store: Any, *given: str) -> None:
        prepare(store, *given)
        store._files = Killing(store._files)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(mirroring.Store, "__init__", wrap)
        upload(run, ended=True)
        return True
    return False


@pytest.fixture
def object_store(tmp_path, monkeypatch) -> Iterator[str]:
    """The URL of an empty folder on a server for S3: moto's, unless MIRROR_URL names another."""
    if url := os.environ.get("MIRROR_URL"):
        folder, mark, query = url.partition("?")
        yield f"{folder}/{secrets.token_hex(8)}{mark}{query}"
        return
    for name, value in zip(KEYS, ("key", "secret", "token"), strict=True):
        monkeypatch.setenv(name, value)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    host, port = address.split(":")
    with (tmp_path / "moto.log").open("wb") as log:
        command = [sys.executable, "-m", "moto.server", "-H", host, "-p", port]
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(lambda: _made_bucket(address), "the bucket", 60)
            yield f"s3://bucket/runs?endpoint_override={address}&scheme=http"
        finally:
            server.kill()
            server.wait()


def _made_bucket(address: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(f"http://{address}/bucket", method="PUT")):
            return True
    except urllib.error.URLError:
        return False


@pytest.mark.slow
def test_a_kill_at_any_write_leaves_the_newest_complete_checkpoint(mirrored, elsewhere, tmp_path, url):
    drawn = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    contents = {step: drawn.randbytes(drawn.randrange(2, 5000)) for step in (10, 20, 30)}
    mirrored.export.mkdir()
    write_json(mirrored.init / "first.npz", {})
    for step, content in contents.items():
        save(mirrored, step, content)
        (mirrored.export / "saved_model.pb").write_bytes(content[:9])
        write_json(mirrored.summary, {"state": "stopped", "steps": step})
        if step < 30:
            upload(mirrored, ended=True)
    store = tmp_path / "store" / "run"
    shutil.copytree(store, tmp_path / "before", ignore=shutil.ignore_patterns("init"))

    def check() -> None:
        steps = stored(tmp_path)
        assert steps[-1] in (20, 30)
        for manifest in store.glob("*/*.json"):
            for name, file in read_json(manifest)["files"].items():
                assert file["sha256"] == sha256(manifest.with_suffix("") / name)
        assert steps[-1] == fetch(elsewhere, url)
        assert contents[steps[-1]] == (elsewhere.checkpoints / f"ckpt-{steps[-1]}.index").read_bytes()
        assert steps[-1] == 20 or (elsewhere.init / "first.npz").exists()
        shutil.rmtree(elsewhere.path)

    for write in itertools.count(1):
        shutil.rmtree(store)
        shutil.copytree(tmp_path / "before", store)
        if upload_until(mirrored, write):
            break
        check()
        upload_until(mirrored, drawn.randrange(1, 30))
        check()
    assert write > 20
    assert [20, 30] == stored(tmp_path)  # as many as the run keeps
    assert [1, 2, 1, 1] == [len(list((store / kind).glob("*/"))) for kind in mirroring.KINDS]


@pytest.mark.parametrize("damage", ["flip", "cut", "manifest", "missing"])
def test_a_damaged_checkpoint_is_skipped_for_the_next(mirrored, elsewhere, tmp_path, url, capsys, damage):
    for step in (10, 20):
        save(mirrored, step)
    upload(mirrored)
    (newest,) = (tmp_path / "store/run/checkpoints").glob("20-*.json")
    file = newest if damage == "manifest" else newest.with_suffix("") / "ckpt-20.data-0"
    content = file.read_bytes()
    file.write_bytes(b"W" + content[1:] if damage == "flip" else content[1:])
    if damage == "missing":
        file.unlink()
    assert 10 == fetch(elsewhere, url)
    assert 1 == capsys.readouterr().out.count("warning: ")


def test_only_a_newer_state_is_fetched(mirrored, url):
    save(mirrored, 10)
    upload(mirrored)
    write_json(mirrored.summary, {"state": "stopped"})
    assert 10 == fetch(mirrored, url)  # the same
    save(mirrored, 20)
    assert 20 == fetch(mirrored, url)  # a newer one here
    upload(mirrored)
    Saved(mirrored.checkpoints, 20).remove()
    assert 20 == fetch(mirrored, url)
    provenance.check_trusted(mirrored)


def test_the_initial_weights_and_the_version_of_the_data_are_in_the_mirror(mirrored, elsewhere, tmp_path, url):
    write_json(mirrored.init / "first.npz", {"version": "1"})
    write_json(mirrored.data_version, {"version": "1"})
    upload(mirrored)
    fetch(elsewhere, url)
    assert {"version": "1"} == read_json(elsewhere.init / "first.npz")
    assert {"version": "1"} == read_json(elsewhere.data_version)
    shutil.rmtree(elsewhere.path)
    next((tmp_path / "store/run/init").glob("0-*/first.npz")).write_bytes(b"other")
    with pytest.raises(PrerequisiteError, match="first weights"):
        fetch(elsewhere, url)


def test_a_folder_that_is_not_a_run_stays(mirrored, elsewhere, url):
    upload(mirrored)
    elsewhere.path.mkdir(parents=True)
    (elsewhere.path / "thesis.txt").touch()
    with pytest.raises(UsageError):
        fetch(elsewhere, url)
    assert [elsewhere.path / "thesis.txt"] == list(elsewhere.path.iterdir())


def test_what_others_put_into_the_mirror_stays(mirrored, tmp_path):
    folder = tmp_path / "store" / "run" / "checkpoints"
    of_another = f"5-{'f' * 16}-{'0' * 16}/ckpt-5.index"
    others = [tmp_path / "store" / "notes.txt", folder / "mine.txt", folder / of_another]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("keep")
    for step in (10, 20, 30, 40):
        save(mirrored, step)
        upload(mirrored)
    assert [30, 40] == stored(tmp_path)
    assert ["keep"] * 3 == [path.read_text() for path in others]


def test_an_abandoned_state_of_a_later_step_is_replaced(mirrored, elsewhere, tmp_path, url):
    for step in (10, 20):
        save(mirrored, step)
        upload(mirrored)
    Saved(mirrored.checkpoints, 20).remove()  # it was damaged here, so the run continued from step 10
    save(mirrored, 15, b"another")
    upload(mirrored)
    assert ([10, 15], 15) == (stored(tmp_path), fetch(elsewhere, url))


def test_nothing_is_uploaded_that_a_task_has_forged(mirrored, tmp_path):
    save(mirrored, 10)
    (tmp_path / "secret").write_text("weights")
    (mirrored.checkpoints / "ckpt-10.index").unlink()
    (mirrored.checkpoints / "ckpt-10.index").symlink_to(tmp_path / "secret")
    upload(mirrored)
    assert [] == stored(tmp_path)
    write_json(mirrored.control / "started.json", read_json(mirrored.control / "started.json") | {"env": ["A=1"]})
    save(mirrored, 20)
    with pytest.raises(UsageError):
        upload(mirrored)
    assert ([20], [1]) == (stored(tmp_path), stored(tmp_path, "records"))


def test_a_failed_upload_is_tried_again_until_the_run_has_ended(mirrored, tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "POLL_S", 0.01)
    save(mirrored, 10)
    (tmp_path / "store").write_text("not a folder")
    thread = threading.Thread(target=uploads.Uploader(mirrored.started.mirror, mirrored, ID).main)
    thread.start()
    wait_for(lambda: (state := mirror.read_upload(mirrored)) and "upload failed" in state.text, "the failure", 30)
    (tmp_path / "store").unlink()
    wait_for(lambda: stored(tmp_path) == [10], "another attempt", 30)
    write_json(mirrored.summary, {"state": "succeeded"})
    thread.join(30)
    assert ["mirror failed"] == [event.event for event in mirrored.events()]
    state = mirror.read_upload(mirrored)
    assert state.complete and "upload failed" not in state.text


def test_a_store_that_does_not_answer_is_given_up_once_the_run_has_ended(mirrored, tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "GIVE_UP_S", 0.0)
    (tmp_path / "store").write_text("not a folder")
    write_json(mirrored.summary, {"state": "succeeded"})
    uploads.Uploader(mirrored.started.mirror, mirrored, ID).main()
    assert not mirror.read_upload(mirrored).complete


def test_down_ends_the_upload(mirrored):
    save(mirrored, 10)
    (mirrored.path.parent / ".running").mkdir()
    mirror.start_upload(mirrored)
    wait_for(lambda: "step 10" in mirror.describe_mirror(mirrored), "the upload", 60)
    mirror.end_uploads(mirrored.path.parent, 0.0)
    assert "not complete" in mirror.describe_mirror(mirrored)


def test_a_mirror_in_an_object_store(mirrored, elsewhere, object_store):
    for work, run in ((_upload_and_damage, mirrored), (_fetch_intact, elsewhere)):  # S3's threads end with a process
        process = multiprocessing.get_context("spawn").Process(target=work, args=(run.path, object_store))
        process.start()
        process.join(100)
        assert 0 == process.exitcode


def _upload_and_damage(folder: Path, url: str) -> None:
    run = RunFolder(folder)
    mirroring.check_mirror(url, "run", ID)
    for step in (10, 20, 30):
        save(run, step)
        uploads.Uploader(url, run, ID).upload(ended=False)
    store = mirroring.Store(url, "run")
    bundles = store.list_bundles(mirroring.CHECKPOINTS)
    assert [30, 20] == [mirroring.number_of(bundle) for bundle in bundles]
    store._write(f"{bundles[0]}/ckpt-30.index", b"damaged")


def _fetch_intact(folder: Path, url: str) -> None:
    assert 20 == fetch(RunFolder(folder), url)


def test_a_mirror_that_cannot_be_used_is_refused(mirrored, url, tmp_path):
    upload(mirrored)
    mirroring.check_mirror(url, "run", ID)
    with pytest.raises(UsageError):
        mirroring.check_mirror(url, "run", "f" * 16)
    with pytest.raises(PrerequisiteError):
        mirroring.check_mirror("file:///proc/mirror", "run", ID)
    assert ["run"] == [path.name for path in (tmp_path / "store").iterdir()]


# The URL: it is tried, and its credentials go to the environment alone


@pytest.mark.parametrize(
    ("typed", "clean"),
    [
        ("s3://KEY:s%2Fcret@bucket/a/?region=eu-west-1", "s3://bucket/a?region=eu-west-1"),
        ("gs://anonymous@bucket/a", "gs://anonymous@bucket/a"),
        ("file:///tmp/Maße%20a", "file:///tmp/Ma%C3%9Fe%20a"),
        *((wrong, None) for wrong in ("s3://K:s/cret@bucket/a", "s3://bucket/a?token=s/cret", "gs://u:s/cret@bucket")),
        *(
            (wrong, None)
            for wrong in ("bucket/a", "s3:///a", "http://bucket", "file://host/a", "file:///", "s3://a/b#c")
        ),
    ],
)
def test_no_credentials_stay_in_a_request(typed, clean, monkeypatch):
    for name in KEYS:
        monkeypatch.setenv(name, "another")
    if clean is None:
        with pytest.raises(UsageError) as refused:
            mirroring.locate_mirror(Request(mirror=typed))
        assert "cret" not in str(refused.value)
        return
    assert clean == mirroring.locate_mirror(Request(mirror=typed)).mirror
    folder, mark, query = clean.partition("?")
    request = mirroring.locate_mirror(Request(resume=f"{folder}/demo{mark}{query}"))
    assert (clean, "demo") == (request.mirror, request.resume)
    if "KEY" in typed:
        assert ["KEY", "s/cret", None] == [os.environ.get(name) for name in KEYS]


def test_a_mirror_is_tried_before_anything_starts_and_kept_by_a_resume(resolved, stopped_run, monkeypatch, tmp_path):
    uploaded, requested = [], {"runtime": "local", "tensorboard_port": "0"}
    monkeypatch.setattr(mirror, "start_upload", uploaded.append)
    refused = planning.plan(Request(name="none", mirror="file:///proc/store", **requested))
    with pytest.raises(PrerequisiteError):
        startup.start(refused, no_shell, began=123.0)
    assert not refused.run.path.exists()
    run = stopped_run(name="one", mirror=f"file://{tmp_path}/store")
    assert [run] == uploaded
    again = planning.plan(Request(resume="one", **requested))
    assert (run.started.mirror, run.started.mirror_id) == (again.mirror, again.mirror_id)
    assert (16, "") == (len(again.mirror_id), planning.plan(Request(resume="one", mirror="none", **requested)).mirror)
