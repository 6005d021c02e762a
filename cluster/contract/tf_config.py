"""Renders and parses TF_CONFIG; no other module knows its JSON.

Source: https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable
"""

import json
import re
from typing import Any

from cluster.contract.spec import ClusterSpec, Role, Task
from cluster.system.errors import UsageError

_HOST = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]")
_NUMBER = re.compile(r"[0-9]{1,5}")


def render(spec: ClusterSpec, task: Task) -> dict[str, Any] | None:
    """Return the task's TF_CONFIG, or None if one process trains alone.

    The evaluator reads the cluster but is never listed in it: a strategy would wait for it indefinitely. Without a
    separate chief, the chief is worker 0, which TensorFlow then treats as the chief, and worker-0 is worker 1.
    """
    if not spec.members:
        return None
    workers_alone = not spec.separate_chief and not spec.of(Role.PS)
    cluster: dict[str, list[str]] = {}
    for member in spec.members:
        cluster.setdefault(Role.WORKER if workers_alone else member.role, []).append(member.address)
    role, index = task.role, spec.of(task.role).index(task)  # among the tasks that are present
    if workers_alone and role != Role.EVALUATOR:
        role, index = Role.WORKER, spec.members.index(task)
    return {"cluster": cluster, "task": {"type": role.value, "index": index}}


def dumps(spec: ClusterSpec, task: Task) -> str | None:
    """Return the task's TF_CONFIG as the value of the environment variable, or None if it must not be set."""
    value = render(spec, task)
    return None if value is None else json.dumps(value, separators=(",", ":"))


def parse(text: str) -> tuple[dict[str, list[str]], Role, int]:
    """Return a TF_CONFIG's addresses by role, and its task's role and index; raise UsageError if it is invalid."""
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
        expected = '{"cluster": {"chief": ["host:port"], "worker": [...]}, "task": {"type": "chief", "index": 0}}'
        raise UsageError(f"TF_CONFIG {text[:200]!r}: {str(error)[:200]}; expected {expected}") from error
    return cluster, role, index
