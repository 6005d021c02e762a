"""A dataset of the user's own: called every time, checked in one line, kept under the digest of its contents."""

import contextlib
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.system.errors import PrerequisiteError, UsageError
from tests.support import own_module
from train.data import user_dataset
from train.data.dataset_record import DTYPES, ArrayRecord
from train.data.prepare import preparation as prepare

ROOT = Path(__file__).parents[4]
IMAGES = np.arange(48, dtype=np.uint8).reshape(3, 4, 4, 1)
LABELS = np.array([0, 2, 1], np.uint8)
FLOATS = np.linspace(0, 1, 6).reshape(3, 2)
"""float64, as NumPy makes them."""
GOOD = {"train": (IMAGES, LABELS), "test": (IMAGES[:1], LABELS[:1])}


@pytest.fixture
def returns(monkeypatch) -> Callable[[Any], str]:
    """Makes a module whose function `data` returns, or raises, the given; returns the name of that dataset."""
    module = own_module.put(monkeypatch, "own_module")

    def make(value: Any) -> str:
        def data() -> Any:
            if isinstance(value, BaseException):
                raise value
            return value

        module.data = data
        return "own_module:data"

    return make


def test_types_become_ones_that_can_be_trained_on(returns):
    weighted = {"train": (FLOATS, FLOATS[:, 0], [1, 2, 3]), "test": (FLOATS, FLOATS[:, 1])}
    dataset = user_dataset.read_dataset(returns(weighted))
    assert ["float32"] * 5 == [array.dtype.name for split in dataset.splits.values() for array in split]
    np.testing.assert_array_equal(FLOATS.astype(np.float32), dataset.splits["train"][0])
    mixed = np.array([[1.5, True], [2, False]], object)  # as Pandas has columns of several types
    (features, _), _ = user_dataset.read_dataset(returns(dict.fromkeys(GOOD, (mixed, [0, 1])))).splits.values()
    assert ("float32", [[1.5, 1], [2, 0]]) == (features.dtype, features.tolist())
    for labels in (LABELS, LABELS.astype(bool), LABELS.astype(np.int16), LABELS.tolist()):
        dataset = user_dataset.read_dataset(returns({"train": (IMAGES, labels), "test": (IMAGES, labels)}))
        assert (np.uint8, np.int64) == tuple(array.dtype for array in dataset.splits["train"])


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int16", "uint16", "uint32", "uint64", "int64", "float16", "float32", "float64"]
)
def test_features_of_any_numeric_type_keep_their_values(dtype, returns):
    limits = np.iinfo(dtype) if np.dtype(dtype).kind in "iu" else None
    most = min(limits.max, 2**63 - 1) if limits else 1
    features = np.array([[limits.min if limits else 0], [most]], dtype)
    dataset = user_dataset.read_dataset(returns({split: (features, [0, 1]) for split in ("train", "test")}))
    stored = dataset.splits["train"][0]
    assert stored.dtype.name in DTYPES["features"]
    assert features.tolist() == stored.tolist()


@pytest.mark.parametrize("dtype", ["uint8", "int64"])
def test_bytes_with_labels_of_their_shape_are_not_a_text(dtype, returns, tmp_path):
    """Only the datasets that are called so are texts, which are cut into contexts."""
    features = np.arange(2 * 1024, dtype=dtype).reshape(2, 1024) % 7
    found = prepare.prepare_dataset(returns(dict.fromkeys(("train", "test"), (features, features))), tmp_path)
    assert found.cut(16) is found


@pytest.mark.parametrize(("value", "warns"), [(np.nan, True), (-np.inf, True), (1e300, True), (0.0, False)])
def test_features_that_are_not_finite_are_warned_of_as_a_layer_can_hide_them(value, warns, returns, capsys):
    test = np.concatenate([FLOATS, [[0.0, value]]])
    user_dataset.read_dataset(returns({"train": (FLOATS, LABELS), "test": (test, [*LABELS, 0])}))
    assert warns == ("at example 3" in capsys.readouterr().out)
    user_dataset.read_dataset(returns({**GOOD, "test": (IMAGES, [0, 6 if warns else 5, 0])}))
    assert warns == ("7 classes" in capsys.readouterr().out)


def test_a_function_may_have_optional_arguments(returns, monkeypatch):
    name = returns(GOOD)
    for function in (lambda size=3, seed=0: GOOD, lambda *sizes, seed=0: GOOD):
        monkeypatch.setattr("own_module.data", function)
        assert user_dataset.read_dataset(name).version == user_dataset.read_dataset(returns(GOOD)).version
    monkeypatch.setattr("own_module.data", lambda split, shard: GOOD)
    with pytest.raises(UsageError, match="--source function"):
        user_dataset.read_dataset(name)


def test_the_version_follows_the_contents(returns):
    variants = [
        GOOD,
        {**GOOD, "classes": ["a", "b", "c"]},
        {**GOOD, "test": (IMAGES[:1], LABELS[1:2])},
        {**GOOD, "train": (IMAGES, LABELS, np.ones(3))},
        {split: (value[0].reshape(-1, 16), value[1]) for split, value in GOOD.items()},
        {split: (value[0].astype(np.int32), value[1]) for split, value in GOOD.items()},
    ]
    versions = [user_dataset.read_dataset(returns(variant)).version for variant in variants]
    assert len(set(versions)) == len(variants)
    in_another_layout = {**GOOD, "train": (np.asfortranarray(IMAGES), LABELS)}
    assert versions[0] == user_dataset.read_dataset(returns(in_another_layout)).version


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (None, "NoneType"),
        ({"train": (IMAGES, LABELS)}, "keys train;"),
        ({**GOOD, "valid": GOOD["test"]}, "keys train, test, valid;"),
        ({**GOOD, "test": IMAGES}, "test"),
        ({**GOOD, "test": (IMAGES, None)}, "test labels are NoneType"),
        ({**GOOD, "train": (IMAGES, LABELS[:2])}, "train has 3 and 2 examples"),
        ({**GOOD, "train": (IMAGES[:0], LABELS[:0])}, "[0, 4, 4, 1]"),
        ({**GOOD, "train": (IMAGES, LABELS.reshape(3, 1)[:, :0])}, "[3, 0]"),
        ({**GOOD, "train": (IMAGES, [0.5, 1e300, 1])}, "train labels have inf at example 1"),
        ({**GOOD, "train": (IMAGES, LABELS, FLOATS)}, "train weights have the shape [3, 2]"),
        ({**GOOD, "train": (IMAGES.astype(complex), LABELS)}, "features are complex128"),
        ({**GOOD, "train": (IMAGES + np.uint64(2**63), LABELS)}, "9223372036854775855"),
        ({**GOOD, "train": (list("abc"), LABELS)}, "examples/text"),
        ({**GOOD, "train": (np.array([[1], [2, 3], [4]], object), LABELS)}, "features are text or objects"),
        ({**GOOD, "test": (IMAGES[:, :2], LABELS)}, "[2, 4, 1] uint8"),
        ({**GOOD, "classes": ["a", "b"]}, "0 to 2"),
        ({**GOOD, "test": (IMAGES, [0, -1, 0])}, "-1 to 2"),
        ({"train": (FLOATS, FLOATS), "test": (FLOATS, FLOATS), "classes": ["a"]}, "classes"),
        (ValueError("no\nsuch file"), "ValueError: no such file ("),
        (SystemExit(0), "sys.exit(0)"),
        ({**GOOD, "classes": 3}, "TypeError"),
    ],
)
def test_unsuitable_data_is_reported_in_one_line(returns, value, named):
    with pytest.raises(UsageError) as error:
        user_dataset.read_dataset(returns(value))
    assert re.match("dataset own_module:data|--dataset 'own_module:data'", str(error.value))
    assert named in str(error.value) and str(error.value).isprintable()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("\n1 / 0\n", r"ZeroDivisionError: .*/own_file\.py:2"),
        ("import no_such_package\n", "--requirements"),
        ("def data():\n    import no_such_package\n", "--requirements"),
        ("data = {}\n", "not callable"),  # rather than a function with arguments
    ],
)
def test_a_module_that_cannot_run_or_has_no_function_is_reported(tmp_path, monkeypatch, text, named):
    own_module.write(monkeypatch, tmp_path, "own_file", text)
    with pytest.raises(UsageError, match=named):
        user_dataset.read_dataset("own_file:data")


def test_the_same_contents_are_written_once(returns, tmp_path):
    data_dir = tmp_path / "data"
    first = prepare.prepare_dataset(returns(GOOD), data_dir)
    written = first.train.files[0].path.stat().st_mtime_ns
    other = prepare.prepare_dataset(returns({**GOOD, "train": GOOD["test"]}), data_dir)
    assert other.version != first.version
    assert other == ArrayRecord.find(data_dir, "own_module:data")
    assert first == ArrayRecord.find(data_dir, "own_module:data", first.version)
    assert first == prepare.prepare_dataset(returns(GOOD), data_dir) == ArrayRecord.find(data_dir, "own_module:data")
    assert written == first.train.files[0].path.stat().st_mtime_ns
    assert {".prepare.lock", "arrays"} == {path.name for path in data_dir.iterdir()}


def test_a_function_that_fails_leaves_what_was_prepared(returns, tmp_path):
    with pytest.raises(UsageError):
        prepare.prepare_dataset(returns(ValueError("no")), tmp_path)
    with pytest.raises(PrerequisiteError):
        ArrayRecord.find(tmp_path, "own_module:data")
    first = prepare.prepare_dataset(returns(GOOD), tmp_path)
    with pytest.raises(UsageError):
        prepare.prepare_dataset(returns(ValueError("no")), tmp_path)
    assert first == ArrayRecord.find(tmp_path, "own_module:data")


DATA = "import numpy as np\nGOOD = {split: (np.ones((2, 2)), np.ones(2)) for split in ('train', 'test')}\n"


def prepare_command(folder: Path, lines: str, **settings: str) -> subprocess.CompletedProcess[str]:
    (folder / "my_data.py").write_text(DATA + textwrap.dedent(lines))
    command = [sys.executable, "-m", "train.data", "prepare", "--name", "my_data:data", "--data-dir", "data"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), **settings}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=environment
    )


def test_a_function_finds_its_files_in_the_folder_of_the_command_and_its_output_is_kept_out_of_the_way(tmp_path):
    (tmp_path / "called").mkdir()
    (tmp_path / "called" / "size.txt").write_text("3")
    lines = """
        def data():
            print("theirs")
            return {split: (np.ones((int(open("size.txt").read()), 2)), np.ones(3)) for split in GOOD}
    """
    done = prepare_command(tmp_path, lines, CALLED_IN=str(tmp_path / "called"))
    assert 0 == done.returncode, done.stderr
    message = r"data: my_data:data [0-9a-f]{12}: 3 examples to train, 3 to test, each \[2\] float32, 1 output\n"
    assert re.fullmatch(message, done.stdout)
    assert "theirs" in done.stderr.splitlines()


def test_datasets_of_the_same_name_in_two_projects_are_two(tmp_path, monkeypatch):
    projects = [tmp_path / "one", tmp_path / "other"]

    @contextlib.contextmanager
    def inside(project: Path) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(project))
            patch.delitem(sys.modules, "same_name", raising=False)
            yield

    versions = []
    for value, project in enumerate(projects):
        project.mkdir()
        data = f"def data(): return {{split: (arrays[0] + {value}, arrays[1]) for split, arrays in GOOD.items()}}"
        (project / "same_name.py").write_text(DATA + data)
        with inside(project):
            versions.append(prepare.prepare_dataset("same_name:data", tmp_path / "data").version)
    for version, project in zip(versions, projects, strict=True):
        with inside(project):
            assert version == ArrayRecord.find(tmp_path / "data", "same_name:data").version


@pytest.mark.slow
def test_a_function_that_uses_tensorflow_runs_in_a_new_process(tmp_path):
    """`fork` stands for one of `up`, which has imported TensorFlow with other variables than the function's."""
    data = "return {split: (np.full((2, 2), 'fork' in sys.modules) + 0.0, np.ones(2)) for split in GOOD}"
    (tmp_path / "my_data.py").write_text(f"{DATA}import sys, tensorflow as tf\ndef data():\n    tf.ones(2); {data}")
    lines = "import sys, tensorflow; sys.modules['fork'] = sys; from train.data.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", lines, "prepare", "--name", "my_data:data", "--data-dir", "data"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "RESULT_FILE": str(tmp_path / "result")}
    subprocess.run(command, cwd=tmp_path, timeout=300, check=True, env=environment)
    (file,) = (tmp_path / "data").rglob("train_features.bin")
    assert not any(file.read_bytes())


@pytest.mark.parametrize(
    ("lines", "timeout_s", "code"),
    [("import os\ndef data(): os._exit(0)", 120, 2), ("import time\ndef data(): time.sleep(600)", 3, 4)],
)
def test_a_function_that_does_not_return_is_reported_in_one_line(tmp_path, lines, timeout_s, code):
    done = prepare_command(tmp_path, lines, DATA_TIMEOUT_S=str(timeout_s))
    assert (code, "") == (done.returncode, done.stdout)
    (message,) = [line for line in done.stderr.splitlines() if not line.startswith("data: calling")]
    assert message.startswith("error: ")
    assert "my_data:data" in message
