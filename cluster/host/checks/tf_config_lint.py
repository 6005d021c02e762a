"""What is wrong with a TF_CONFIG, whoever wrote it: every mistake at once, each with its fix.

`cluster.contract.tf_config.parse` refuses a TF_CONFIG at its first mistake; here it is read as far as it goes.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import ipaddress
import json
import re
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from cluster.contract.findings import Finding
from cluster.contract.spec import Role
from cluster.contract.strategies import Strategy
from cluster.system.messages import counted

ROLES = (*(role.value for role in Role), "master")
"""The task types that TensorFlow knows; `master` is the chief of TensorFlow 1."""
EPHEMERAL = range(32768, 61000)
"""The ports that Linux gives to outgoing connections by default."""
PRIVILEGED = range(1, 1024)
REACH_TIMEOUT_S = 2.0
MAX_ADDRESSES = 4096
_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")
_ANY_ADDRESS = ("0.0.0.0", "[::]", "::")  # noqa: S104  # refused, and not bound
_THIS_MACHINE = ("localhost", "127.", "[::1]")


@dataclass(frozen=True)
class Member:
    """A task as a TF_CONFIG lists it."""

    role: str
    index: int
    address: str

    @property
    def name(self) -> str:
        """`worker 1`."""
        return f"{self.role} {self.index}"

    @property
    def host(self) -> str:
        """The address without its port."""
        return self.address.rpartition(":")[0] or self.address

    @property
    def port(self) -> int | None:
        """The port; None where there is none, or no number."""
        text = self.address.rpartition(":")[2]
        return int(text) if re.fullmatch(r"[0-9]{1,9}", text) and ":" in self.address else None


@dataclass(frozen=True)
class Reading:
    """What could be read of a TF_CONFIG, and what is wrong with its form."""

    members: tuple[Member, ...] = ()
    role: str = ""
    """The type of the task that it was made for; empty where it names none."""
    index: int = 0
    findings: list[Finding] = field(default_factory=list)

    def of(self, role: str) -> tuple[Member, ...]:
        """Return the tasks of one type."""
        return tuple(member for member in self.members if member.role == role)


def lint(reading: Reading, strategy: Strategy | None = None) -> list[Finding]:
    """Return everything that is wrong with a TF_CONFIG.

    Args:
        reading: of the TF_CONFIG.
        strategy: that is to train on it; None where it is not known.
    """
    checks = [_roles, _task, _addresses, _names, _duplicates, _machines]
    found = [*reading.findings, *(finding for check in checks for finding in check(reading))]
    return [*found, *_strategy(reading, strategy)]


# The form


def read(text: str) -> Reading:
    """Return what can be read of the text of a TF_CONFIG."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Reading(findings=[_malformed(text, error)])
    if isinstance(value, str):
        inner = read(value)
        twice = _failed("json", "the JSON is a string that holds JSON: it was encoded twice", "encode it once")
        return Reading(inner.members, inner.role, inner.index, [twice, *inner.findings])
    if not isinstance(value, dict):
        return Reading(findings=[_failed("json", f"it is {_kind(value)}", 'write {"cluster": {...}, "task": {...}}')])
    found: list[Finding] = []
    members = tuple(_members(value.get("cluster"), found))
    role, index = _own_task(value.get("task"), found)
    return Reading(members, role, index, found)


def _malformed(text: str, error: Exception) -> Finding:
    if not text.strip():
        return _failed("json", "it is empty", "set TF_CONFIG, or unset it where one process trains alone")
    where = f"line {error.lineno}, column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else ""
    return _failed("json", where or str(error)[:100], _repair(text))


def _repair(text: str) -> str:
    """Return how a text is made JSON."""
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(re.sub(r",(?=\s*[\]}])", "", text))
        return "remove each comma before a closing bracket"
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        if isinstance(ast.literal_eval(text.strip()), dict):
            return "this is Python's way to write a dict: use json.dumps, which writes double quotes"
    if '\\"' in text:
        return "the quotes are escaped once too often: remove the backslashes"
    if "TF_CONFIG" in text:
        return "this is more than TF_CONFIG: give its value alone, from { to }"
    return "correct it there"


def _members(cluster: Any, found: list[Finding]) -> Iterator[Member]:
    if not isinstance(cluster, dict) or not cluster:
        found.append(
            _failed("cluster", f"'cluster' is {_kind(cluster)}", 'write {"worker": ["host:port", ...]} with every task')
        )
        return
    left = MAX_ADDRESSES
    for role, addresses in cluster.items():
        # TensorFlow also takes {"0": "host:port"}, for clusters that know only some of their tasks
        listed = addresses if isinstance(addresses, list) else None
        if isinstance(addresses, dict) and all(str(key).isdigit() for key in addresses):
            numbered = {int(key): address for key, address in addresses.items()}
        elif listed is None:
            found.append(_failed("cluster", f"{role!r} is {_kind(addresses)}", 'write a list: ["host:port", ...]'))
            continue
        else:
            numbered = dict(enumerate(listed))
        for index, address in list(numbered.items())[:left]:
            if isinstance(address, str):
                yield Member(role, index, address)
            else:
                found.append(_failed("address", f"{role} {index} is {_kind(address)}", 'write "host:port"'))
        left = max(0, left - len(numbered))
    if not left:
        found.append(Finding("cluster", "warning", f"only the first {MAX_ADDRESSES} tasks were looked at"))


def _own_task(task: Any, found: list[Finding]) -> tuple[str, int]:
    fix = 'add "task": {"type": "worker", "index": 0}, with each task\'s own type and index'
    if not isinstance(task, dict) or not isinstance(task.get("type"), str):
        found.append(_failed("task", "it does not say which task it is for", fix))
        return "", 0
    if "index" not in task:
        found.append(_failed("task", "it does not say which index this task has", fix))
    index = task.get("index", 0)
    if isinstance(index, str) and re.fullmatch(r"[0-9]{1,9}", index):
        found.append(Finding("task", "warning", f"the index {index!r} is a text", f"write the number {index}"))
        index = int(index)
    elif not isinstance(index, int) or isinstance(index, bool):
        found.append(_failed("task", f"the index is {_kind(index)}", "write a whole number from 0"))
        index = 0
    return task["type"], index


# The tasks


def _roles(reading: Reading) -> Iterator[Finding]:
    counts = Counter(member.role for member in reading.members)
    for role in counts:
        if role not in ROLES:
            yield _failed("roles", f"{role!r} is no task type of TensorFlow", _known_roles(role))
    if counts["evaluator"]:
        yield _failed(
            "evaluator",
            "the evaluator is listed in 'cluster', so every strategy waits for it",
            "remove it from 'cluster'; only its own 'task' says that it is the evaluator",
        )
    if counts["chief"] + counts["master"] > 1:
        chiefs = [*reading.of("chief"), *reading.of("master")]
        listed = [f"{member.name} ({member.address})" for member in chiefs]
        yield _failed("chief", f"there are {len(listed)} chiefs: {', '.join(listed)}", "keep one; others are workers")
    elif counts["master"]:
        yield Finding("chief", "warning", "'master' is the chief of TensorFlow 1", "write 'chief'")
    for role, count in counts.items():
        indices = {member.index for member in reading.of(role)}
        if indices != set(range(count)):
            yield Finding("roles", "warning", f"{role} lists only the indices {sorted(indices)[:8]}", "list all")


def _known_roles(role: str) -> str:
    if role.startswith("workerpool"):
        return "this is Vertex AI's CLUSTER_SPEC; read TF_CONFIG, which it sets, too"
    close = difflib.get_close_matches(role.lower(), ROLES[:-1], n=1)
    return f"write {close[0]!r}" if close else f"use {', '.join(ROLES[:-1])}"


def _task(reading: Reading) -> Iterator[Finding]:
    role, index = reading.role, reading.index
    if not role or role == "evaluator":
        return
    indices = [member.index for member in reading.of(role)]
    if not indices and reading.members:
        known = ", ".join(dict.fromkeys(member.role for member in reading.members))
        yield _failed("task", f"this task is {role} {index}, and the cluster has only: {known}", f"add it as {role!r}")
    elif indices and index not in indices:
        yield _failed(
            "task",
            f"the index {index} is out of range: there are {counted(len(indices), role)}",
            f"use an index from 0 to {max(indices)}, or list this task's address under {role!r}",
        )


def _strategy(reading: Reading, strategy: Strategy | None) -> Iterator[Finding]:
    servers, workers = reading.of("ps"), reading.of("worker")
    if servers and strategy and not strategy.served:
        yield _failed(
            "strategy",
            f"{strategy.class_name} has no parameter servers, and waits for ps 0 for ever",
            "remove 'ps', or train with ParameterServerStrategy",
        )
    elif servers and not strategy:
        yield Finding(
            "strategy",
            "warning",
            "with 'ps' in the cluster, only ParameterServerStrategy can train; others wait for ps 0 for ever",
            "remove 'ps' for any other strategy; --strategy ps says that it is this one",
        )
    if servers and not workers:
        yield _failed("strategy", "there are parameter servers and no worker", "add 'worker'")
    if servers and workers and not (reading.of("chief") or reading.of("master")):
        yield _failed("strategy", "ParameterServerStrategy needs a chief, which hands out the steps", "add 'chief'")
    if strategy and strategy.served and not servers:
        yield _failed("strategy", f"{strategy.class_name} needs parameter servers", "add 'ps'")
    if strategy and strategy.one_process and len(reading.members) > 1:
        yield _failed(
            "strategy",
            f"{strategy.class_name} trains in one process, and {len(reading.members)} tasks are listed",
            "unset TF_CONFIG, or use MultiWorkerMirroredStrategy",
        )


# The addresses


def _addresses(reading: Reading) -> Iterator[Finding]:
    for member in reading.members:
        shown = f"{member.name}: {member.address[:100]!r}"
        if "://" in member.address:
            yield _failed("address", f"{shown} has a scheme", "write host:port alone")
        elif member.port is None or not member.host or member.address.startswith(":"):
            yield _failed("address", f"{shown} is not host:port", "write the host and the port on which it listens")
        elif not 0 < member.port < 65536:
            yield _failed("port", f"{shown}: nobody reaches port {member.port}", "use a port from 1024 to 32767")
        elif member.port in PRIVILEGED:
            yield Finding("port", "warning", f"{shown}: ports below 1024 need root", "use one from 1024 to 32767")
        elif member.port in EPHEMERAL:
            yield Finding(
                "port",
                "warning",
                f"{shown}: Linux gives ports from {EPHEMERAL[0]} to outgoing connections, so it may be taken",
                "use one from 1024 to 32767",
            )


def _names(reading: Reading) -> Iterator[Finding]:
    for member in reading.members:
        host = member.host
        if "://" in member.address or not host or _is_address(host):
            continue
        shown = f"{member.name}: {host[:100]!r}"
        labels = host.removesuffix(".").split(".")
        if labels[-1].isdigit():
            yield _failed("name", f"{shown} is neither a name nor an IPv4 address", "correct the address")
        elif len(host) > 253:
            yield _failed("name", f"{shown} has more than 253 characters", "use a shorter name")
        elif all(_LABEL.fullmatch(label.replace("_", "x")) for label in labels):
            if "_" in host:
                yield Finding(
                    "name",
                    "warning",
                    f"{shown} has an underscore: containers resolve it, DNS and Kubernetes refuse it",
                    "use '-' instead",
                )
        else:
            yield _failed(
                "name",
                f"{shown} is refused by DNS",
                "each part has 1 to 63 letters, digits and '-', and neither begins nor ends with '-'",
            )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _is_here(host: str) -> bool:
    return host.lower().startswith(_THIS_MACHINE)


def _duplicates(reading: Reading) -> Iterator[Finding]:
    listed: dict[tuple[str, int | None], list[Member]] = {}
    for member in reading.members:
        host = "localhost" if _is_here(member.host) else member.host.lower()
        listed.setdefault((host, member.port), []).append(member)
    for same in listed.values():
        if len(same) > 1:
            names = ", ".join(member.name for member in same)
            yield _failed("duplicate", f"{names} have the same address {same[0].address}", "give each its own")


def _machines(reading: Reading) -> Iterator[Finding]:
    for member in reading.members:
        if member.host in _ANY_ADDRESS:
            yield _failed(
                "localhost",
                f"{member.name}: {member.host} is where a server listens, not where others reach it",
                "write the machine's name or address",
            )
    here = [member for member in reading.members if _is_here(member.host)]
    others = [member for member in reading.members if not _is_here(member.host)]
    if here and others:
        yield _failed(
            "localhost",
            f"{', '.join(member.name for member in here)} on {here[0].host}, and {others[0].name} on {others[0].host}: "
            "on every machine, localhost is that machine",
            "write each machine's name or address",
        )


def reach(reading: Reading, timeout_s: float = REACH_TIMEOUT_S) -> list[Finding]:
    """Return which addresses cannot be reached from here: all listen while the cluster runs."""
    members = [member for member in reading.members if member.port and 0 < member.port < 65536]
    with ThreadPoolExecutor(max_workers=32) as pool:
        return [found for found in pool.map(lambda member: _reached(member, timeout_s), members) if found]


def _reached(member: Member, timeout_s: float) -> Finding | None:
    try:
        with socket.create_connection((member.host.strip("[]"), member.port or 0), timeout_s):
            return None
    except (socket.gaierror, UnicodeError):
        return _failed("reach", f"{member.name}: {member.host!r} does not resolve here", "correct the name, or the DNS")
    except TimeoutError:
        fix = "open the port in the firewall between the machines"
        return _failed("reach", f"{member.name}: {member.address} does not answer in {timeout_s:g} s", fix)
    except OSError as error:
        detail = f"{member.name}: {member.address}: {error.strerror or error}"
        return _failed("reach", detail, "start this task; it listens once TensorFlow has started")


def _failed(check: str, detail: str, fix: str) -> Finding:
    return Finding(check, "failed", detail, fix)


def _kind(value: Any) -> str:
    if value is None:
        return "missing"
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    empty = "empty, " if value in ({}, [], "") else ""
    return f"{empty}{names[type(value)]}"
