"""Builds a run's model on the machine that starts it, before the run starts.

    python -m train.startup.preflight check OPTIONS    checks model and loss
    python -m train.startup.preflight memory OPTIONS   counts the model's memory

`cluster/host/launch/configuration.py` calls it, with the options of `model_checks.check_parts` as JSON. Only
configurations with a user's parts are checked, because that imports TensorFlow. The result goes to the file that
`cluster/contract/user_code.py` names.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from cluster.contract import kept_results, user_code
from train.config import TrainConfig
from train.startup import preload


def main(work: str, described: str) -> int:
    """Do the work, `check` or `memory`, with options that JSON describes; return the exit code."""
    options = json.loads(described)
    config, data_dir = TrainConfig.from_json(options.pop("config")), Path(options.pop("data_dir"))
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    preload.set_variables(config, options["strategy"])

    def build() -> dict[str, Any]:
        missing = _watch_variables()
        from train.startup import model_checks, model_sizes  # imports TensorFlow

        if work == "memory":
            return model_sizes.measure_model(config, options["strategy"], data_dir)
        return model_checks.check_parts(config, data_dir=data_dir, **options) | {"missing": sorted(missing)}

    return user_code.reply(build)


def _watch_variables() -> set[str]:
    """Return the environment variables that the user's code will look for and not find."""
    variables: Any = os.environ  # its attributes are not in the type stubs
    missing, encode = set[str](), variables.encodekey

    def record(key: str) -> Any:
        encoded, caller = encode(key), sys._getframe(1)
        if caller.f_code.co_name == "__getitem__" and encoded not in variables._data:
            while caller.f_back and caller.f_code.co_filename.startswith("<frozen"):  # os.getenv
                caller = caller.f_back
            if kept_results.is_users(caller.f_code.co_filename):
                missing.add(key)
        return encoded

    variables.encodekey = record
    return missing


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # without TensorFlow's teardown, which can wait for the user's threads
