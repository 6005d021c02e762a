"""The training configuration, resolved and tried by the training program, which commands never import.

A trial of a user's model is cached as long as all its inputs are the same: the request, the environment, the program,
the installed packages, the prepared data, and the content of the user's modules and their imports. Files that a user's
function opens are not tracked; the tasks check what they load.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.contract import user_code
from cluster.contract.spec import ClusterSpec
from cluster.host.launch.folders import data_dir
from cluster.host.options.request import PRESET, Request
from cluster.host.runtime.payload import python_path
from cluster.system import files
from cluster.system.json_files import read_json, write_json
from cluster.system.paths import ROOT

VOLATILE = ("_", "OLDPWD", "PWD", "SHLVL", "COLUMNS", "LINES")
"""Variables that differ between calls from the same shell."""
KEPT_TRIALS = 50


def resolve_config(
    request: Request,
    base: Path | None = None,
    packages: Path | None = None,
    code_dirs: Sequence[str] = (),
    cores: int = 0,
) -> tuple[dict[str, Any], tuple[Path, ...], str]:
    """Return the checked configuration, the folders of the user's modules in it, and a description of its data.

    The description is empty if the data must be prepared first.

    Args:
        base: the `config.json` of a resumed or repeated run, which replaces the preset.
        packages: the folder of extra packages that the user's modules import.
        code_dirs: the folders of the user's modules in the resumed or repeated run, as a fallback.
        cores: number of cores of each task on another machine; 0 for those of this machine.

    Raises:
        UsageError: a preset, an option or a value is wrong.
    """
    command = [f"--data-dir={data_dir()}", f"--cores={cores}", *([f"--base={base}"] if base else [])]
    value: dict[str, Any] = _ask(request, [*command, "--", *request.training()], packages, code_dirs)
    return value["config"], tuple(Path(folder) for folder in value["code_dirs"]), value["data"]


def check_config(
    config: dict[str, Any],
    cluster: ClusterSpec,
    path: Sequence[str],
    *,
    memory_bytes: int = 0,
    start: user_code.Start | None = None,
) -> dict[str, Any]:
    """Check that a configuration's data, model and loss fit together; the data must be prepared.

    Built-in ones do. Others, and a model that is cut into stages, are tried, which takes as long as TensorFlow's import
    unless `start` starts a process that has imported it. The user's modules are in the folders of `path`; a stage may
    use `memory_bytes`, 0 for any amount.

    Returns:
        The result of `train.pipeline.stage_models.describe_partition` for a model with stages, and under `unverified`
        the operations that keep oneDNN off, see `train/startup/primitives.py`; empty for built-in models.
    """
    named = [str(config.get(part, "")) for part in ("dataset", "model", "loss", "metrics")]
    named.append(config.get("optimizer", {}).get("name", ""))
    own = any(":" in part and not part.startswith("train.") for name in named for part in re.split("[=,]", name))
    if not (own or cluster.kind.staged):
        return {}
    numbers = {
        "replicas": cluster.replicas,
        "batch_divisor": cluster.batch_divisor,
        "stages": cluster.stages if cluster.kind.staged else 0,
        "pipelines": cluster.pipelines,
        "memory_bytes": memory_bytes or None,
    }
    options = (
        f"--model {config['model']!r}, --loss {config['loss']!r} or --optimizer.name {config['optimizer']['name']!r}"
    )
    return _preflight("check", config, cluster, path, options, numbers, start)


def count_memory(config: dict[str, Any], cluster: ClusterSpec, path: Sequence[str]) -> dict[str, Any]:
    """Return the sizes of the parts of a configuration's model, such as weights and activations, in bytes."""
    return _preflight("memory", config, cluster, path, f"--model {config['model']!r}", {})


def _preflight(
    work: str,
    config: dict[str, Any],
    cluster: ClusterSpec,
    path: Sequence[str],
    options: str,
    numbers: dict[str, int | None],
    start: user_code.Start | None = None,
) -> dict[str, Any]:
    """Run `train/startup/preflight.py`; the result of a check is cached while its inputs are unchanged."""
    described = {"config": config, "strategy": cluster.strategy, "data_dir": str(data_dir()), **numbers}
    command = [sys.executable, "-m", "train.startup.preflight", work, json.dumps(described)]
    kept, began = locate_trial(data_dir(), command, path) if work == "check" else None, time.time()
    if kept and (known := recall_trial(kept)) is not None:
        return known
    printed: list[bytes] = []
    answer: dict[str, Any] = user_code.run(
        command,
        options,
        "PRESET_TIMEOUT_S",
        environment=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        printed=printed,
        start=start,
    )
    if kept:
        keep_trial(kept, began, answer, b"".join(printed).decode(errors="replace"))
    return answer


def describe_training_options(request: Request) -> str:
    """Return the help of the training options."""
    return str(_ask(request, ["--", "-h"], None))


def _ask(request: Request, words: list[str], packages: Path | None, code_dirs: Sequence[str] = ()) -> Any:
    preset = request.preset or PRESET
    # The program runs in the checkout, but the user's modules are next to the run file or in the caller's folder.
    here = [folder for folder in (request.code_dir, str(Path.cwd())) if folder and folder != str(ROOT)]
    path = [*here, *python_path(), *code_dirs, *([str(packages)] if packages else [])]
    return user_code.run(
        [sys.executable, "-m", "train", "--print-config", f"--preset={preset}", *words],
        f"--preset {preset!r}",
        "PRESET_TIMEOUT_S",
        # For presets that import TensorFlow: no start-up messages, and no GPU memory taken from a training run.
        environment={"TF_CPP_MIN_LOG_LEVEL": "3"}
        | os.environ
        | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": os.pathsep.join(path)},
    )


def recall_trial(file: Path) -> dict[str, Any] | None:
    """Return the cached result of a trial, and print its output again.

    Returns None without a cached result, or if a module has changed since.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        kept = read_json(file)
        if all(files.sha256(Path(name)) == digest for name, digest in kept["files"].items()):
            result: dict[str, Any] = dict(kept["result"])
            print(kept["printed"], end="", file=sys.stderr)
            return result
    return None


def keep_trial(file: Path, began: float, result: dict[str, Any], printed: str) -> None:
    """Cache the result of a trial, which lists the files of the imported modules, and its output.

    `began` is the start of the trial in seconds since the epoch: nothing is cached if a module was edited after it.
    """
    paths = [Path(name) for name in result.pop("files")]
    with contextlib.suppress(OSError):  # the trial is then repeated next time
        digests = {str(path): files.sha256(path) for path in paths}
        if any(path.stat().st_mtime >= began for path in paths):
            return
        file.parent.mkdir(exist_ok=True)
        write_json(file, {"files": digests, "result": result, "printed": printed})
        for old in sorted(file.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT_TRIALS]:
            old.unlink()


def locate_trial(data: Path, command: Sequence[str], path: Sequence[str]) -> Path:
    """Return the cache file for a trial: its name depends on the command, the environment and the data."""
    known = [*(ROOT / "train").rglob("*.py"), *(ROOT / "train").rglob("*.toml"), *data.glob("*/*/*.json")]
    states = sorted(_state(file) for file in known)
    variables = {name: value for name, value in os.environ.items() if name not in VOLATILE}
    packages = Path(sysconfig.get_path("purelib"))  # its time changes with every installation
    versions = [sys.version, str(packages), packages.stat().st_mtime_ns]
    depends_on = json.dumps([list(command), list(path), variables, versions, states], sort_keys=True)
    return data / "trials" / f"{hashlib.sha256(depends_on.encode()).hexdigest()[:32]}.json"


def _state(file: Path) -> tuple[str, int, int]:
    """Return the path, size and modification time of a file; zeros if another command has just removed it."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return str(file), 0, 0
    return str(file), status.st_size, status.st_mtime_ns
