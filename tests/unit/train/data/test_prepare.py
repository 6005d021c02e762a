"""Preparing a dataset: the order of the sources, once for all processes, whole or not at all. Sources are stubs."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.system.errors import PrerequisiteError, UsageError
from cluster.system.json_files import read_json
from tests import fast
from train.data import store
from train.data.dataset_record import ArrayRecord, Leaf
from train.data.prepare import jargon_file
from train.data.prepare import preparation as prepare
from train.data.prepare.download import SourceFile

ROOT = Path(__file__).parents[4]
CONTENT = b"the original file"
SOURCE = SourceFile("train.gz", "http://x", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
IMAGES = np.arange(48, dtype=np.uint8).reshape(3, 4, 4, 1)
LABELS = np.array([0, 1, 2], np.int64)


class FakeDataset:
    """Is built by writing one file, which is all it decodes."""

    def __init__(self, name: str, version: str, data_dir: Path) -> None:
        self.record = data_dir / name / version / "x.tfrecord"

    def source_files(self) -> tuple[SourceFile, ...]:
        return (SOURCE,)

    def build(self, sources: Path, scratch: Path) -> None:
        assert CONTENT == (sources / SOURCE.name).read_bytes()
        self.record.parent.mkdir(parents=True)
        self.record.write_bytes(b"built")

    def decode(self) -> tuple[tuple[str, ...], dict[str, tuple[np.ndarray, np.ndarray]]]:
        if not self.record.exists():
            raise PrerequisiteError("none there")
        return ("a", "b", "c"), {"train": (IMAGES, LABELS), "test": (IMAGES[:1], LABELS[:1])}

    def files(self) -> tuple[Path, ...]:
        return (self.record,)


class Fetcher:
    """A source that gives `content`, or fails with `reason`; counts its calls."""

    def __init__(self, content: bytes = CONTENT, reason: str = "") -> None:
        self.content, self.reason, self.calls = content, reason, 0

    def __call__(self, dataset: str, files: Sequence[SourceFile], folder: Path) -> None:
        self.calls += 1
        assert [] == list(folder.iterdir())
        for file in files:
            (folder / file.name).write_bytes(self.content)
        if self.reason:
            raise PrerequisiteError(self.reason)


@pytest.fixture(autouse=True)
def sources(monkeypatch) -> None:
    """Use stubs of the sources, which `run` names."""
    monkeypatch.setattr(prepare, "FETCHERS", {})
    monkeypatch.setattr(prepare, "_dataset_class", lambda name: FakeDataset)


def run(data_dir: Path, fresh: bool = False, **fetchers: Fetcher) -> ArrayRecord:
    prepare.FETCHERS = fetchers
    return prepare.prepare_dataset("mnist", data_dir, fresh)


def source_of(data_dir: Path) -> str:
    return str(read_json(data_dir / "arrays" / "mnist-3.0.1" / "arrays.json")["source"])


def test_the_first_source_that_gives_the_original_files_is_used(tmp_path):
    offline, portal = Fetcher(reason="offline"), Fetcher(b"<html>log in first</html>")
    good, unused = Fetcher(), Fetcher()
    record = run(tmp_path, web=offline, mirror=portal, package=good, other=unused)
    assert [1, 1, 1, 0] == [each.calls for each in (offline, portal, good, unused)]
    assert "package" == source_of(tmp_path)
    assert IMAGES.tobytes() == record.train.files[0].path.read_bytes()
    assert {"mnist/3.0.1/x.tfrecord": hashlib.sha256(b"built").hexdigest()} == record.source_files
    assert {".prepare.lock", "arrays", "mnist"} == {path.name for path in tmp_path.iterdir()}


def test_what_is_in_place_needs_no_source(tmp_path):
    """The arrays, or the dataset of TFDS alone."""
    first, unused = run(tmp_path, web=Fetcher()), Fetcher()
    assert first == run(tmp_path, web=unused)
    run(tmp_path, fresh=True, web=unused)
    assert "TFDS dataset in place" == source_of(tmp_path)
    assert 0 == unused.calls


def test_no_source_at_all_says_why_each_failed_and_what_to_do(tmp_path):
    with pytest.raises(PrerequisiteError) as error:
        run(tmp_path, web=Fetcher(reason="no such host"), package=Fetcher(content=b"?"))
    for named in ("TFDS dataset in place: ", "web: no such host", "package: train.gz", "arrays/mnist-3.0.1"):
        assert named in str(error.value)
    assert [".prepare.lock"] == [path.name for path in tmp_path.iterdir()]


def test_processes_at_once_prepare_once(tmp_path, monkeypatch):
    fast.leave_out("imports TensorFlow")
    waiting = threading.Semaphore(0)

    def say(message: str) -> None:
        if "another process prepares data in" in message:
            waiting.release()

    class SlowFetcher(Fetcher):
        """Gives its file only once the two others wait for it."""

        def __call__(self, *arguments: Any) -> None:
            assert waiting.acquire(timeout=10) and waiting.acquire(timeout=10)
            super().__call__(*arguments)

    monkeypatch.setattr(store, "say", say)
    web = SlowFetcher()
    # flock separates two openings of a file, so threads meet here as processes do.
    threads = [threading.Thread(target=run, args=(tmp_path,), kwargs={"web": web}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 == web.calls
    assert 3 == ArrayRecord.find(tmp_path, "mnist").train.num_examples


def test_a_killed_prepare_leaves_nothing_half_and_the_next_one_works(tmp_path):
    fast.leave_out("imports TensorFlow")
    if not (killed := os.fork()):
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        try:
            run(tmp_path, web=Fetcher())
        finally:
            os._exit(1)
    assert signal.SIGKILL == os.WTERMSIG(os.waitpid(killed, 0)[1])
    assert (tmp_path / ".mnist.partial" / "arrays" / "arrays.json").exists()
    with pytest.raises(PrerequisiteError, match="is not prepared"):
        ArrayRecord.find(tmp_path, "mnist")
    run(tmp_path, web=Fetcher())
    assert {".prepare.lock", "arrays", "mnist"} == {path.name for path in tmp_path.iterdir()}


def test_an_unknown_name_starts_nothing(tmp_path):
    with pytest.raises(UsageError, match="unknown dataset 'mnits'; did you mean 'mnist'"):
        prepare.prepare_dataset("mnits", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_folder_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(UsageError, match=r"data cannot be used \(File exists\); set DATA_DIR to another folder"):
        run(tmp_path / "data", web=Fetcher())


def command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m train.data`, and fail if that imported TensorFlow."""
    script = """
        import sys
        from train.data.__main__ import main
        code = main(sys.argv[1:])
        assert "tensorflow" not in sys.modules and "numpy" not in sys.modules
        sys.exit(code)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    environment = {**os.environ, "COLUMNS": "400"}  # no wrapped lines
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_command_finds_and_verifies_without_tensorflow(tmp_path):
    run(tmp_path, web=Fetcher())
    options = ["--name", "mnist", "--data-dir", str(tmp_path)]
    found = command_line("prepare", *options)
    message = "data: mnist 3.0.1: 3 examples to train, 1 to test, each [4, 4, 1] uint8, 3 classes\n"
    assert (0, message) == (found.returncode, found.stdout)
    verified = command_line("verify", *options)
    assert (0, ["ok"] * 5) == (verified.returncode, [line.split()[1] for line in verified.stdout.splitlines()])
    (tmp_path / "mnist" / "3.0.1" / "x.tfrecord").write_bytes(b"BUILT")
    verified = command_line("verify", *options)
    assert 1 == verified.returncode
    assert verified.stderr.startswith(f"error: {tmp_path}/mnist/3.0.1/x.tfrecord: changed since")


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [(["prepare", "--frehs"], 2, "--frehs"), (["verify", "--data-dir", "/nowhere"], 3, "/nowhere")],
)
def test_the_command_fails_in_one_line(arguments, code, named):
    done = command_line(*arguments)
    assert code == done.returncode
    assert done.stderr.startswith("error: ") and named in done.stderr and 1 == done.stderr.count("\n")


TEXT = bytes(range(97, 123)) * 30


def test_labels_are_the_bytes_that_follow_and_splits_do_not_overlap():
    splits = jargon_file.split_text(TEXT, 50)
    features = np.concatenate([splits[part][0].ravel() for part in ("train", "test")])
    labels = np.concatenate([splits[part][1].ravel() for part in ("train", "test")])
    assert features.tobytes() == TEXT[: len(features)]
    assert labels.astype(np.uint8).tobytes() == TEXT[1 : len(labels) + 1]
    assert (13, 50) == splits["train"][0].shape and (2, 50) == splits["test"][0].shape


@pytest.mark.slow
def test_a_text_is_prepared_from_a_package_and_found(monkeypatch, tmp_path):
    file = SourceFile("jargon.dict", "", len(TEXT), hashlib.sha256(TEXT).hexdigest())
    monkeypatch.setattr(jargon_file, "FILE", file)
    monkeypatch.setattr(jargon_file.split_text, "__defaults__", (64,))

    def fetch(dataset, files, folder):
        (folder / file.name).write_bytes(TEXT)

    monkeypatch.setattr(prepare, "FETCHERS", {"package": fetch})
    monkeypatch.setattr(prepare, "_dataset_class", lambda name: jargon_file.JargonFile)
    prepare.prepare_dataset("jargon_file", tmp_path)
    found = ArrayRecord.find(tmp_path, "jargon_file")
    assert (11, 256) == (found.train.num_examples, found.num_outputs)
    assert {"features": Leaf((64,), "uint8"), "labels": Leaf((64,), "int64")} == found.train.example
