"""The training configuration, resolved by the training program itself: it knows it, and this side never imports it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from cluster import answers, inherited
from cluster.request import PRESET, Request

ROOT = Path(__file__).resolve().parent.parent


def resolve(
    request: Request, base: Path | None, packages: Path | None, data_dir: Path
) -> tuple[dict[str, Any], tuple[Path, ...], str]:
    """Return the checked configuration, the folders that its own modules come from, and what data is prepared for it.

    The last is in words, and empty where its data must be prepared first.

    Args:
        request: what was asked for.
        base: the `config.json` of a run that is resumed, instead of the preset.
        packages: extra packages that those modules import.
        data_dir: where prepared data lies.

    Raises:
        UsageError: a preset, an option or a value is wrong.
    """
    command = ["--data-dir", str(data_dir), *(["--base", str(base)] if base else [])]
    value = _ask(request.preset or PRESET, [*command, "--", *request.training()], packages)
    return value["config"], tuple(Path(folder) for folder in value["code_dirs"]), value["data"]


def options(request: Request) -> str:
    """Return the help of the training options.

    Raises:
        UsageError: there is no such preset.
    """
    return str(_ask(request.preset or PRESET, ["--", "-h"], None))


def _ask(preset: str, words: list[str], packages: Path | None) -> Any:
    # The caller's modules are looked for where the caller is, although the program runs in the checkout.
    here = [] if Path.cwd() == ROOT else [str(Path.cwd())]
    path = [*here, *inherited.python_path(), *([str(packages)] if packages else [])]
    return answers.ask(
        [sys.executable, "-m", "train", "--print-config", "--preset", preset, *words],
        f"--preset {preset!r}",
        "PRESET_TIMEOUT_S",
        cwd=ROOT,
        # For presets that import TensorFlow: no start-up messages, and no GPU taken from whoever trains on it.
        environment={"TF_CPP_MIN_LOG_LEVEL": "3"}
        | os.environ
        | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": os.pathsep.join(path)},
    )
