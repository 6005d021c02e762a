"""Builds a run's model on the machine that starts it, before the run starts.

    python -m train.startup.preflight --config JSON --strategy NAME --data-dir DIR            checks model and loss
    python -m train.startup.preflight --config JSON --strategy NAME --data-dir DIR --memory   counts the model's memory

The checks are only for configurations with a user's parts, because they import TensorFlow. The result goes to the file
that `cluster/contract/user_code.py` names.
"""

import argparse
import json
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from cluster.contract import user_code
from cluster.system.paths import ROOT
from train.config import TrainConfig
from train.startup import preload


def main(arguments: list[str]) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m train.startup.preflight", description="Tries a run's model and loss."
    )
    parser.add_argument("--config", type=json.loads, required=True, help="the run's configuration as JSON")
    parser.add_argument("--strategy", required=True, help="a key of cluster.strategies.STRATEGIES")
    parser.add_argument("--replicas", type=int, default=1, help="number of replicas (default: %(default)s)")
    parser.add_argument("--batch-divisor", type=int, default=1, help="how many share a batch (default: %(default)s)")
    parser.add_argument("--stages", type=int, default=0, help="number of stages (default: not cut)")
    parser.add_argument("--pipelines", type=int, default=1, help="number of pipelines (default: %(default)s)")
    parser.add_argument("--memory-bytes", type=int, help="memory of each stage (default: no limit)")
    parser.add_argument("--data-dir", type=Path, required=True, help="prepared data")
    parser.add_argument("--memory", action="store_true", help="only count the model's memory")
    options = vars(parser.parse_args(arguments))
    config, only_memory = TrainConfig.from_json(options.pop("config")), options.pop("memory")
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    preload.set_variables(config, options["strategy"])

    def build() -> dict[str, Any]:
        from train.startup import model_checks  # imports TensorFlow

        if only_memory:
            return model_checks.measure_model(config, options["strategy"], options["data_dir"])
        return model_checks.check_parts(config, **options) | {"files": _users_files()}

    return user_code.reply(build)


def _users_files() -> list[str]:
    """Return the files of all imported modules that are neither ours nor installed with Python nor generated."""
    paths = sysconfig.get_paths()
    others = [
        ROOT / "cluster",
        ROOT / "train",
        Path(tempfile.gettempdir()),  # of this process alone
        *(Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    ]
    modules: list[str | None] = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return sorted({file for file in modules if file and not any(Path(file).is_relative_to(each) for each in others)})


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # without TensorFlow's teardown, which can wait for the user's threads
