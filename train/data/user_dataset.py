"""A user's dataset: a function, named `package.module:function`, that returns NumPy arrays.

    def my_data():
        return {"train": (features, labels), "test": (features, labels), "classes": ["cat", "dog"]}

Features are `[N, ...]`; labels `[N, ...]`, whole numbers from 0 (classes) or floats (quantities). A third array of a
split, `[N]` floats, has the weights of examples. "classes" is optional.

Features for a model with several inputs are a dictionary of arrays, and so are labels for one with several heads.
"classes" is then a dictionary of the heads whose classes have names.
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cluster.contract import user_code
from cluster.system.errors import UsageError, nearest
from train import named
from train.data.dataset_record import DTYPES, SPLITS, Leaf, check_names, show_example, stored_dtype
from train.named import Named
from train.settings import references


@dataclass(frozen=True)
class UserDataset:
    """The checked result of the function; see `train.data.dataset_record.Split` for the arrays."""

    classes: Named
    splits: Mapping[str, tuple[Named, ...]]
    version: str
    """The first 12 digits of the sha256 of all contents."""


def read_dataset(name: str) -> UserDataset:
    """Call the function `package.module:function` and return its arrays, in the types of `DTYPES`.

    Its current folder is that of the user's command, where it finds the files that it names.
    """
    with _own_tensorflow(), contextlib.chdir(os.environ.get(user_code.FOLDER, ".")):
        function = references.load_object("--dataset", name)
        if callable(function) and not references.accepts_arguments(function):
            raise UsageError(f"dataset {name} takes arguments; add -- --source function if they are (split, shard)")
        returned = references.call_user_function("--dataset", name, function)
    with references.user_errors(f"dataset {name} returns a value that cannot be converted to arrays"):
        if not isinstance(returned, Mapping) or not set(SPLITS) <= set(returned) <= {*SPLITS, "classes"}:
            is_mapping = isinstance(returned, Mapping)
            got = f"the keys {', '.join(map(str, returned))}" if is_mapping else type(returned).__name__
            raise UsageError(
                f'dataset {name} returns {got}; expected a dictionary of "train", "test" and perhaps "classes"'
            )
        splits = {split: _split(f"dataset {name}: {split}", returned[split]) for split in SPLITS}
        classes = _classes(name, returned.get("classes", ()), splits["train"][1])
        _check(name, classes, splits)
        return UserDataset(classes, splits, _version(classes, splits))


@contextlib.contextmanager
def _own_tensorflow() -> Iterator[None]:
    """Context manager that runs this program again, as a new process, once the user's function uses TensorFlow.

    For a fork of `up` whose TensorFlow has the kernels of the run: the data must not depend on them.
    """
    imported = sys.modules.get("tensorflow.python.eager.context")
    if not imported or user_code.RESULT_FILE not in os.environ:
        yield
        return
    command, folder, environment = [sys.executable, "-m", "train.data", *sys.argv[1:]], Path.cwd(), dict(os.environ)
    initialize, process = imported.Context.ensure_initialized, os.getpid()

    def run_again(context: Any) -> None:
        if os.getpid() == process:
            sys.stdout.flush()
            os.chdir(folder)
            os.execve(sys.executable, command, environment)  # noqa: S606
        initialize(context)

    imported.Context.ensure_initialized = run_again
    yield
    imported.Context.ensure_initialized = initialize


def _classes(name: str, returned: Any, labels: Named) -> Named:
    heads = isinstance(labels, Mapping)
    if isinstance(returned, Mapping) and not heads:
        raise UsageError(f"dataset {name}: classes are a dictionary, but labels are not; expected a list of names")
    if not heads:
        return tuple(str(label) for label in returned)
    if returned and not isinstance(returned, Mapping):
        raise UsageError(f"dataset {name}: classes are a {type(returned).__name__}; expected a dictionary, as labels")
    for head in returned or ():
        if head not in labels:
            raise UsageError(f"dataset {name}: classes of {head!r}{nearest(str(head), list(labels))}")
    return {head: tuple(str(label) for label in (returned or {}).get(head, ())) for head in labels}


def _split(subject: str, returned: Any) -> tuple[Named, ...]:
    if not isinstance(returned, Sequence) or len(returned) not in (2, 3):
        raise UsageError(f"{subject} is neither (features, labels) nor (features, labels, weights)")
    split = tuple(_part(subject, part, value) for part, value in zip(DTYPES, returned, strict=False))
    features, labels, *weights = split
    lengths = [len(array) for part in split for array in named.leaves(part)]
    if len(set(lengths)) > 1:
        raise UsageError(f"{subject} has {' and '.join(map(str, lengths))} examples; expected the same number")
    for part, value, least in (("features", features, "example"), ("labels", labels, "value")):
        for which, array in named.in_words(value).items():
            if 0 in array.shape:
                shape = list(array.shape)
                raise UsageError(f"{subject} {part}{which} have the shape {shape}; expected at least one {least}")
    if weights and weights[0].ndim != 1:
        raise UsageError(f"{subject} weights have the shape {list(weights[0].shape)}; expected [N]")
    return split


def _part(subject: str, part: str, value: Any) -> Named:
    if not isinstance(value, Mapping) or part == "weights":
        return _array(f"{subject} {part}", part, value)
    check_names(f"{subject} {part}", value)
    return {name: _array(f"{subject} {part} {name!r}", part, item) for name, item in value.items()}


def _array(subject: str, part: str, value: Any) -> np.ndarray:
    array = array_of(subject, part, value)
    if part == "features" and (bad := _not_finite(array)):
        print(f"warning: {subject} have {bad}, which a layer such as ReLU can hide: check losses and metrics")
    return array


def array_of(subject: str, part: str, value: Any) -> np.ndarray:
    """Convert a value to an array of a type that is suitable for training."""
    array = np.asarray(value)
    if array.dtype.kind == "O":  # of columns of several types, as Pandas makes it
        with contextlib.suppress(ValueError):  # rows of several lengths
            array = np.array(array.tolist())
    if array.ndim == 0:
        raise UsageError(f"{subject} are {type(value).__name__}, not an array; expected a NumPy array")
    if array.dtype == np.uint64 and part != "weights":
        if array.max(initial=0) > np.iinfo(np.int64).max:
            raise UsageError(f"{subject} contain {array.max()}; expected whole numbers below 2**63")
        array = array.astype(np.int64)
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(array, stored_dtype(subject, part, array.dtype))
    if part != "features" and (bad := _not_finite(array)):
        raise UsageError(f"{subject} have {bad}; expected finite numbers")
    return array


def _not_finite(array: np.ndarray) -> str:
    """Describe the first NaN or infinity of an array; empty if it has none."""
    if array.dtype.kind != "f" or not array.size or np.isfinite([array.min(), array.max()]).all():
        return ""
    first = np.unravel_index(np.argmin(np.isfinite(array)), array.shape)
    return f"{array[first]} at example {first[0]}"


def _check(name: str, classes: Named, splits: Mapping[str, tuple[Named, ...]]) -> None:
    examples = [
        {
            part: named.each(lambda array: Leaf(array.shape[1:], array.dtype.name), arrays)
            for part, arrays in zip(("features", "labels"), splits[split], strict=False)
        }
        for split in SPLITS
    ]
    if examples[0] != examples[1]:
        both = " and ".join(map(show_example, examples))
        raise UsageError(f"dataset {name}: examples of train and test are {both}; expected the same")
    labels = named.each(lambda *pair: pair, *(splits[split][1] for split in SPLITS))
    for (which, (train, test)), names in zip(named.in_words(labels).items(), named.leaves(classes), strict=True):
        if train.dtype == np.float32:
            if names:
                raise UsageError(
                    f"dataset {name}: classes{which} are named, but the labels are floats; expected whole numbers"
                )
            continue
        low, high = min(int(train.min()), int(test.min())), max(int(train.max()), int(test.max()))
        if low < 0 or (names and high >= len(names)):
            most = f"0 to {len(names) - 1}, a number for each class" if names else "0 and more"
            raise UsageError(f"dataset {name}: labels{which} go from {low} to {high}; expected {most}")
        if not names and high >= train.size + test.size:
            counts = f"{high + 1:,} classes, more than their {train.size + test.size:,} values"
            advice = "number those that occur from 0 on, or use floats for quantities"
            print(f"warning: dataset {name}: labels{which} have {counts}; {advice}")


def _version(classes: Named, splits: Mapping[str, tuple[Named, ...]]) -> str:
    digest = hashlib.sha256(repr(classes).encode())
    for split in SPLITS:
        for part in splits[split]:
            for which, array in named.in_words(part).items():
                digest.update(f"{split}{which} {array.dtype.name} {array.shape}".encode())
                digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False).data)
    return digest.hexdigest()[:12]
