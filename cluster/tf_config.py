"""TF_CONFIG: the only place that knows its JSON.

Source: https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable
"""

from __future__ import annotations

import json
import re
from typing import Any

from cluster.errors import UsageError
from cluster.spec import ClusterSpec, Role, Task

_HOST = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]")
_NUMBER = re.compile(r"[0-9]{1,5}")


def render(spec: ClusterSpec, task: Task) -> dict[str, Any] | None:
    """Return the task's TF_CONFIG, or None where one process trains alone.

    The evaluator reads the cluster but is never listed in it: a strategy would wait for it for ever.
    """
    if not spec.members:
        return None
    cluster: dict[str, list[str]] = {}
    for member in spec.members:
        cluster.setdefault(member.role.value, []).append(member.address)
    return {"cluster": cluster, "task": {"type": task.role.value, "index": task.index}}


def dumps(spec: ClusterSpec, task: Task) -> str | None:
    """Return the task's TF_CONFIG as the text of the environment variable, or None where it is not set."""
    value = render(spec, task)
    return None if value is None else json.dumps(value, separators=(",", ":"))


def without_chief(text: str) -> str:
    """Return a TF_CONFIG whose chief is worker 0, as TensorFlow's multi-worker tutorials have it.

    It describes the same cluster: where no task is called chief, TensorFlow takes worker 0 for it. With parameter
    servers, where the chief is no worker, nothing changes.
    """
    value = json.loads(text)
    cluster, task = value["cluster"], value["task"]
    if "chief" not in cluster or "ps" in cluster:
        return text
    workers = [*cluster["chief"], *cluster.get("worker", [])]
    index = 0 if task["type"] == "chief" else task["index"] + 1
    return json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}, separators=(",", ":")
    )


def parse(text: str) -> tuple[dict[str, list[str]], Role, int]:
    """Return the cluster's addresses by role, and the role and index of the task that TF_CONFIG was made for.

    Raises:
        UsageError: the text is not a TF_CONFIG.
    """
    try:
        value = json.loads(text)
        cluster = {str(role): [str(address) for address in addresses] for role, addresses in value["cluster"].items()}
        role, index = Role(value["task"]["type"]), int(value["task"]["index"])
        if odd := [role for role in cluster if not role.isidentifier()]:
            raise ValueError(f"{odd[0]!r} is not a role")
        for address in (address for addresses in cluster.values() for address in addresses):
            host, _, port = address.rpartition(":")
            if not _HOST.fullmatch(host) or not _NUMBER.fullmatch(port) or not 0 < int(port) < 65536:
                raise ValueError(f"address {address!r} is not host:port")
        if role != Role.EVALUATOR and not 0 <= index < len(cluster.get(role.value, [])):
            raise ValueError(f"task {role.value} {index} is not in the cluster")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"TF_CONFIG {text[:200]!r}: {str(error)[:200]}; expected "
            '{"cluster": {"chief": ["host:port"], "worker": [...]}, "task": {"type": "chief", "index": 0}}'
        ) from error
    return cluster, role, index
