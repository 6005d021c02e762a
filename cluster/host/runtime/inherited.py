"""The environment variables that tasks inherit from the caller of `up`: those listed here, and no others.

So a run does not depend on variables that happen to be set, such as the TF_CONFIG of another cluster, and no secret
reaches a task by accident. `--env` adds to the list.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from cluster.contract import settings
from cluster.system.errors import UsageError

PREFIXES = ("TF_", "TFDS_", "TFHUB_", "KERAS_", "XLA_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "DNNL_", "ONEDNN_")
DEVICE_PREFIXES = ("CUDA_", "CUDNN_", "CUBLAS_", "NCCL_", "NVIDIA_TF32_", "GRPC_", "TPU_", "PJRT_", "LIBTPU_")
"""What TensorFlow, Keras and the libraries below them read: for every task."""

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
"""For every local task, and for the containers of a script, which may reach the network."""

PROCESS = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR"),
        *("XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "HF_HOME", "RUNS_DIR", "LD_LIBRARY_PATH", "LD_PRELOAD"),
        *("PYTHONPATH", "PYTHONHASHSEED", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GOOGLE_APPLICATION_CREDENTIALS"),
    }
)
"""What local tasks need besides, or locate this machine's files with."""

OWN = frozenset(
    {
        *("TF_CONFIG", "TASK", "RUN_DIR", "DATA_DIR", "GENERATION", "RESTARTS", "GATE_FD", "STANDBY_PROCESS"),
        *("STOP_THEN", settings.SECRET_FILES, "CLUSTER_JSON", "GPUS_PER_TASK", "RECORDS_DIR"),
        *("REPLACED_TASK", "ATTEMPT", "LOST_THEN", "TASK_COPY"),
        *("GPUS_GIVEN", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "TF_CLUSTER_TOKEN"),
    }
)
"""What is set for each task, or must not be set: never inherited."""

UNSUITED = OWN | {"PYTHONPATH", "RUNS_DIR"}
"""What `--env` cannot set: these are set where `up` is called."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def for_process(names: Collection[str] = ()) -> dict[str, str]:
    """Return the variables that local tasks inherit, with the additional ones of `--env`."""
    listed = PROCESS | {*names, *PROXIES}
    found = {}
    for name, value in os.environ.items():
        if name in listed or name.startswith("LC_") or _for_all(name):
            found[name] = value
    if "PYTHONPATH" in found:  # tasks run in another folder than the caller
        found["PYTHONPATH"] = os.pathsep.join(python_path())
    return found


def for_container(*, way_out: bool) -> dict[str, str | None]:
    """Return the variables that containers inherit; those without a value get the caller's at the start."""
    # A path of this machine means nothing there.
    names = [name for name, value in os.environ.items() if _for_all(name) and not value.startswith("/")]
    names += [name for name in PROXIES if name in os.environ and way_out]
    return dict.fromkeys(names)


def _for_all(name: str) -> bool:
    return name not in OWN and (name.startswith((*PREFIXES, *DEVICE_PREFIXES)) or name in settings.OF_TASKS)


def python_path() -> list[str]:
    """Return the caller's PYTHONPATH with absolute folders: our commands run in another folder than the caller."""
    return [str(Path(folder).absolute()) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def parse(given: Sequence[str]) -> dict[str, str | None]:
    """Return the variables that `--env NAME[=VALUE]` gives to tasks; None is the value that is set here."""
    found: dict[str, str | None] = {}
    for words in given:
        name, equals, value = words.partition("=")
        if not _NAME.fullmatch(name) or "\0" in value:
            raise UsageError(f"--env {words!r}: expected NAME or NAME=VALUE; write it as --env NAME=VALUE")
        if name in UNSUITED:
            raise UsageError(f"--env {name}: it is set for each task, or where you call `up`; leave it out")
        if not equals and name not in os.environ:
            raise UsageError(f"--env {name}: it is not set here; set it, or give a value with --env {name}=VALUE")
        found[name] = value if equals else None
    return found


def parse_secrets(given: Sequence[str], env: Sequence[str] = ()) -> dict[str, Path]:
    """Return the files of `--secret NAME=FILE`, by the variables, which `--env` must not give, too."""
    found: dict[str, Path] = {}
    for words in given:
        name, _, file = words.partition("=")
        if not _NAME.fullmatch(name) or not file:
            raise UsageError(f"--secret {words!r}: expected NAME=FILE, such as WANDB_API_KEY=~/.wandb-key")
        if name in UNSUITED or name in parse(env):
            raise UsageError(f"--secret {name}: it is set for each task, or by --env; leave one of them out")
        path = Path(file).expanduser().absolute()
        if not (path.is_file() and os.access(path, os.R_OK)):
            raise UsageError(f"--secret {name}: {path} is not a file that you can read; write the value into one")
        found[name] = path
    return found
