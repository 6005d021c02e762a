"""The training configuration, resolved and tried by the training program, which commands never import.

The result of a trial of a user's model is kept, see `cluster/contract/kept_results.py`; the tasks check what they load.
"""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.contract import kept_results, user_code
from cluster.contract.spec import ClusterSpec
from cluster.host.launch.folders import data_dir
from cluster.host.options.request import PRESET, Request
from cluster.host.runtime.payload import python_path
from cluster.system.errors import UsageError
from cluster.system.files import ROOT


def resolve_config(
    request: Request,
    base: Path | None = None,
    packages: Path | None = None,
    code_dirs: Sequence[str] = (),
    cores: int = 0,
) -> tuple[dict[str, Any], tuple[Path, ...], str]:
    """Return the checked configuration, the folders of the user's modules in it, and a description of prepared data.

    Args:
        base: the `config.json` of a resumed or repeated run, which replaces the preset.
        packages: the folder of extra packages that the user's modules import.
        code_dirs: the folders of the user's modules in the resumed or repeated run; those that are gone do not count.
        cores: number of cores of each task on another machine; 0 for those of this machine.
    """
    command = [f"--data-dir={data_dir()}", f"--cores={cores}", *([f"--base={base}"] if base else [])]
    value: dict[str, Any] = ask_trainer(request, [*command, "--", *request.training()], packages, code_dirs)
    return value["config"], tuple(Path(folder) for folder in value["code_dirs"]), value["data"]


def check_config(
    config: dict[str, Any],
    cluster: ClusterSpec,
    environment: Mapping[str, str],
    *,
    memory_bytes: int = 0,
    start: user_code.Start | None = None,
) -> dict[str, Any]:
    """Check that a configuration's data, model and loss fit together; the data must be prepared.

    Built-in ones do. Others, and models cut into stages, are tried in the tasks' `environment`, which takes as long as
    TensorFlow's import unless `start` starts a process that has imported it. A stage may use `memory_bytes`, 0 for any.

    Returns:
        The partition of a model with stages; under `unverified` the operations that keep oneDNN off, and `missing` the
        variables that the user's code looked for and did not find. Empty for built-in models.
    """
    named = [str(config.get(part, "")) for part in ("dataset", "model", "loss", "metrics")]
    named.append(config.get("optimizer", {}).get("name", ""))
    own = any(":" in part and not part.startswith("train.") for name in named for part in re.split("[=,]", name))
    if not (own or cluster.kind.staged):
        return {}
    command = _preflight_command(
        "check",
        config,
        cluster,
        replicas=cluster.replicas,
        batch_divisor=cluster.batch_divisor,
        stages=cluster.stages if cluster.kind.staged else 0,
        pipelines=cluster.pipelines,
        memory_bytes=memory_bytes or None,
    )
    kept = kept_results.locate(data_dir(), command, environment, data_dir().glob("*/*/*.json"))
    if known := kept_results.recall(kept):
        found, printed = known
        print(printed, end="", file=sys.stderr)
    else:
        options = f"--model {config['model']!r}, --loss {config['loss']!r} or --optimizer.name {named[-1]!r}"
        found = user_code.run(command, options, "PRESET_TIMEOUT_S", environment=environment, start=start, kept=kept)
    return dict(found)


def measure_model(config: dict[str, Any], cluster: ClusterSpec, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the number of a model's parameters, and the bytes of its parts, such as weights and activations."""
    command = _preflight_command("memory", config, cluster)
    return dict(user_code.run(command, f"--model {config['model']!r}", "PRESET_TIMEOUT_S", environment=environment))


def _preflight_command(work: str, config: dict[str, Any], cluster: ClusterSpec, **numbers: int | None) -> list[str]:
    described = {"config": config, "strategy": cluster.strategy, "data_dir": str(data_dir()), **numbers}
    return [sys.executable, "-m", "train.startup.preflight", work, json.dumps(described)]


def ask_trainer(request: Request, words: list[str], packages: Path | None = None, code_dirs: Sequence[str] = ()) -> Any:
    """Return the output of `python -m train --print-config` for a request and further words, such as `-h`."""
    preset = request.preset or PRESET
    # The program runs in the checkout, but the user's modules are next to the run file or in the caller's folder. Where
    # an earlier run found its own comes before the latter, which may be another project's with a module of that name.
    folders = [each for each in (request.code_dir, *code_dirs, str(Path.cwd())) if each and each != str(ROOT)]
    own = [word for word in (preset, *request.training()) if ":" in word]
    if own and (split := next((each for each in folders if os.pathsep in each), "")):
        raise UsageError(f"{own[0]}: Python imports nothing from {split!r}, whose path has a colon; rename that folder")
    path = [*folders, *python_path(), *([str(packages)] if packages else [])]
    return user_code.run(
        [sys.executable, "-m", "train", "--print-config", f"--preset={preset}", *words],
        f"--preset {preset!r}",
        "PRESET_TIMEOUT_S",
        # For presets that import TensorFlow: no start-up messages, and no GPU memory taken from a training run.
        environment={"TF_CPP_MIN_LOG_LEVEL": "3"}
        | os.environ
        | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": os.pathsep.join(path)},
    )
