"""Python runs this module first in a script's process; it patches Keras 3 once the script has imported it.

It uses a meta-path finder, so that a script without Keras pays nothing. The script itself is not modified.
"""

import atexit
import importlib.machinery
import importlib.util
import json
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
"""Parts of the errors that Keras 3 raises for calls that Keras 2 accepted."""


class KerasFinder:
    """Meta-path finder for Keras only."""

    @staticmethod
    def find_spec(name: str, path: Any = None, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find Keras as Python would, and patch it once it is loaded."""
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == "keras" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                patch(module)

            spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def patch(keras: ModuleType) -> None:
    """Apply the patches for scripts if the imported Keras is Keras 3 on TensorFlow."""
    try:
        if keras.config.backend() == "tensorflow":
            # Load the package by its path: in this process `train` can be the user's module.
            name = "_tf_cluster_patches"
            if name not in sys.modules:
                spec = importlib.util.spec_from_file_location(name, HERE.parent / "__init__.py")
                assert spec is not None
                assert spec.loader is not None
                sys.modules[name] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(sys.modules[name])
            sys.modules[name].apply(sys.modules[name].SCRIPTS)
    except Exception as error:
        print(f"warning: Keras cannot be patched for several tasks: {error!r:.300}", file=sys.stderr, flush=True)


def needs_keras_2(error: BaseException, trace: TracebackType | None) -> str | None:
    """Return the script's call that Keras 3 rejects, if the error comes from one; otherwise None."""
    message = next(iter(str(error).strip().splitlines()), "")
    if os.environ.get("TF_USE_LEGACY_KERAS", "0") not in ("0", "", "False") or "keras" not in sys.modules:
        return None
    frames = list(traceback.walk_tb(trace))
    script_frames = [at for at, (frame, _) in enumerate(frames) if "site-packages" not in frame.f_code.co_filename]
    if not script_frames or not any(part in message for part in CHANGED):
        return None
    inner = [frame.f_globals.get("__name__", "") for frame, _ in frames[script_frames[-1] + 1 :]]
    owner = type(getattr(error, "obj", None)).__module__  # of an AttributeError
    if not any(name.startswith("keras.") for name in (*inner, owner)) and "keras" not in message:
        return None
    frame, line = frames[script_frames[-1]]
    file = Path(frame.f_code.co_filename)
    call = linecache.getline(str(file), line).strip()
    return f"line {line} of {file.name}, `{call:.200}`, is written for Keras 2: add --env TF_USE_LEGACY_KERAS=1"


def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error as Python does, followed by the call that needs Keras 2."""
    sys.__excepthook__(kind, error, trace)
    if line := needs_keras_2(error, trace):
        print(line, file=sys.stderr, flush=True)


def warn_of_solitude() -> None:
    """Warn of a script that used TensorFlow and never joined the other workers of TF_CONFIG."""
    config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    cluster, task = config.get("cluster", {}), config.get("task", {})
    context = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    if "ps" in cluster or task.get("index") or task.get("type") == "evaluator":
        return
    if context is None or context._context_handle is None:
        return
    number = sum(map(len, cluster.values()))
    if number > 1 and context._server_def is None and context._collective_ops_server_def is None:
        print(
            f"warning: no strategy joined the {number} tasks, so each ran this script alone; build the model in the "
            "scope of a tf.distribute.MultiWorkerMirroredStrategy",
            file=sys.stderr,
            flush=True,
        )


def install() -> None:
    """Install the finder and the hooks, and run the `sitecustomize` that this one hides."""
    if "TF_CLUSTER_SCRIPT" not in os.environ:  # else the script has started this process
        os.environ["TF_CLUSTER_SCRIPT"] = str(os.getpid())
        atexit.register(warn_of_solitude)
    sys.meta_path.insert(0, KerasFinder)
    sys.excepthook = explain
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    install()
