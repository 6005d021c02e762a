"""What Python runs first in a script's process: mends Keras 3 once the script has imported it.

A meta-path finder, so that a script that imports no Keras pays nothing. The script itself is run unmodified.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import linecache
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
CHANGED = (
    "filepath extension",
    "must end in",
    "not recognized",
    "unexpected keyword",
    "has no attribute",
    "nrecognized",
    "not supported",
    "cannot import name",
)
"""Parts of the errors with which Keras 3 refuses what Keras 2 took."""


class KerasFinder:
    """Finds Keras, and only that."""

    @staticmethod
    def find_spec(name: str, path: Any = None, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find it as Python would, and mend it once it is loaded."""
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == "keras" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def mended(module: ModuleType) -> None:
                execute(module)
                mend(module)

            spec.loader.exec_module = mended  # type: ignore[method-assign]
        return spec


def mend(keras: ModuleType) -> None:
    """Apply the layer to the Keras that was imported, if that is Keras 3 on TensorFlow."""
    try:
        if keras.config.backend() == "tensorflow":
            for name in ("fit", "replicas", "callbacks"):
                load(name).apply()
    except Exception as error:
        print(f"warning: Keras is not mended for several tasks: {error!r:.300}", file=sys.stderr, flush=True)


def load(name: str) -> Any:
    """Return a module of this folder's parent by its path: in this process `train` can be the user's."""
    known = f"_tf_cluster_keras3_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, HERE.parent / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]


def needs_keras_2(error: BaseException, trace: TracebackType | None) -> str | None:
    """Return which call of the script Keras 3 refuses, if that is what an error comes from."""
    message = next(iter(str(error).strip().splitlines()), "")
    if os.environ.get("TF_USE_LEGACY_KERAS", "0") not in ("0", "", "False") or "keras" not in sys.modules:
        return None
    frames = list(traceback.walk_tb(trace))
    own = [at for at, (frame, _) in enumerate(frames) if "site-packages" not in frame.f_code.co_filename]
    if not own or not any(part in message for part in CHANGED):
        return None
    inner = [frame.f_globals.get("__name__", "") for frame, _ in frames[own[-1] + 1 :]]
    owner = type(getattr(error, "obj", None)).__module__  # of an AttributeError
    if not any(name.startswith("keras.") for name in (*inner, owner)) and "keras" not in message:
        return None
    frame, line = frames[own[-1]]
    file = Path(frame.f_code.co_filename)
    call = linecache.getline(str(file), line).strip()
    return f"line {line} of {file.name}, `{call:.200}`, is written for Keras 2: add --env TF_USE_LEGACY_KERAS=1"


def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error as Python does, and after it which call needs Keras 2."""
    sys.__excepthook__(kind, error, trace)
    if line := needs_keras_2(error, trace):
        print(line, file=sys.stderr, flush=True)


def install() -> None:
    """Install both, and run the `sitecustomize` that this one hides."""
    sys.meta_path.insert(0, KerasFinder)
    sys.excepthook = explain
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    install()
