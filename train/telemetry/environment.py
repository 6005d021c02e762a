"""The environment of this task, as far as it can change bits: versions, processor, threads, variables."""

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tensorflow as tf

from cluster.contract.run.folder import RunFolder
from cluster.system.errors import RunFailed
from cluster.system.files import sha256
from cluster.system.json_files import read_json, write_json
from train.data.dataset_record import advice
from train.data.sources import Source

PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "tf_keras", "numpy", "nvidia-nccl-cu12")
PREFIXES = ("TF_", "KERAS_", "XLA_", "OMP_", "MKL_", "KMP_", "NCCL_", "CUDA_", "GRPC_", "DNNL_", "ONEDNN_")
INSTRUCTIONS = ("sse4_2", "avx", "fma", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")
"""Instruction sets by which TensorFlow and its libraries choose kernels, and so the order of sums."""


def record_environment(run: RunFolder, dataset: str, source: Source) -> None:
    """Write `environment.json`, and add data and environment to the manifest; raise RunFailed if data has changed."""
    environment, manifest = describe_environment(), read_json(run.manifest, {})
    write_json(run.environment, environment)
    data, record = manifest.get("data", {}), source.record
    if (data.get("name"), data.get("version")) != (dataset, record.version):  # otherwise this is a later generation
        # Shards can be too large to be verified now; their blocks are verified whenever a shard is read.
        for file in record.files if source.in_memory else ():
            if sha256(file.path) != file.sha256:
                again = f"{advice(record.kind, record.name)}, then start again"
                raise RunFailed(f"{file.path} has changed since it was prepared; {again}")
        files = {file.path.name: file.sha256 for file in record.files}
        data = {"name": dataset, "version": record.version, "files": files, "made_from": dict(record.source_files)}
    write_json(run.manifest, manifest | {"data": data, "environment": environment})


def describe_environment() -> dict[str, Any]:
    """Describe the environment, without paths, user names or secrets."""
    build, details = tf.sysconfig.get_build_info(), tf.config.experimental.get_device_details
    return {
        "python": platform.python_version(),
        "packages": {name: installed for name in PACKAGES if (installed := _version(name))},
        "cuda": build.get("cuda_version"),
        "cudnn": build.get("cudnn_version"),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [details(gpu).get("device_name") for gpu in tf.config.list_physical_devices("GPU")],
        "threads": {
            "inter_op": tf.config.threading.get_inter_op_parallelism_threads(),
            "intra_op": tf.config.threading.get_intra_op_parallelism_threads(),
        },
        "variables": relevant_variables(dict(os.environ)),
    }


def relevant_variables(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment variables that can change results; values with a path as their sha256."""
    relevant = {}
    for name, value in sorted(environment.items()):
        if name.startswith(PREFIXES) and name != "TF_CONFIG":  # which is recorded separately
            relevant[name] = f"sha256:{hashlib.sha256(value.encode()).hexdigest()}" if "/" in value else value
    return relevant


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    return {"model": fields.get("model name"), "instructions": [name for name in INSTRUCTIONS if name in flags]}
