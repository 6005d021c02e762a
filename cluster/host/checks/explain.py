"""`invoke explain`: describes a cluster and lists all mistakes in its TF_CONFIG, each with its fix.

`cluster.contract.tf_config.parse` stops at the first mistake; this module reads a TF_CONFIG as far as possible.
"""

import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cluster.contract import settings, strategies, tf_config
from cluster.contract.spec import ClusterSpec, Role
from cluster.host.runtime.base import Finding
from cluster.host.view.columns import columns, plain_lines
from cluster.system.errors import UsageError, nearest
from cluster.system.messages import counted

MAX_BYTES = 2**20
GOOD_PORT = "use a port from 1024 to 32767"
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_ANY_ADDRESS = ("0.0.0.0", "[::]", "::")  # noqa: S104  # refused, and not bound
_THIS_MACHINE = ("localhost", "127.", "[::1]")
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
_WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


@dataclass(frozen=True)
class Member:
    """A task that a TF_CONFIG lists."""

    role: str
    index: int
    address: str

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0] or self.address

    @property
    def port(self) -> int | None:
        """The port; None if it is missing or not a number."""
        text = self.address.rpartition(":")[2]
        return int(text) if re.fullmatch(r"[0-9]{1,9}", text) and ":" in self.address else None

    @property
    def is_here(self) -> bool:
        """Whether the address means the local machine on every machine."""
        return self.host.lower().startswith(_THIS_MACHINE)


@dataclass
class Explained:
    """A cluster, the part of each of its tasks, and the mistakes in its TF_CONFIG."""

    source: str
    strategy: strategies.Strategy | None = None
    members: list[Member] = field(default_factory=list)
    role: str = ""
    """The type of the TF_CONFIG's own task; empty if TF_CONFIG names none."""
    index: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there are no mistakes; warnings do not count."""
        return all(finding.state != "failed" for finding in self.findings)

    @property
    def likely(self) -> strategies.Strategy:
        """The strategy or, if unknown, the usual one of such a cluster."""
        guess = "ps" if self.select("ps") else "multiworker" if len(self.members) > 1 else "one"
        return self.strategy or strategies.get(guess)

    def select(self, *roles: str) -> list[Member]:
        """Return the tasks of these types, in the order of the types."""
        return [member for role in roles for member in self.members if member.role == role]

    def fail(self, check: str, detail: str, fix: str) -> None:
        self.findings.append(Finding(check, "failed", detail, fix))

    def warn(self, check: str, detail: str, fix: str) -> None:
        self.findings.append(Finding(check, "warning", detail, fix))

    def duty(self, member: Member) -> str:
        if member.role == Role.EVALUATOR:
            return "evaluates every new checkpoint, outside the cluster"
        if self.likely.served:
            return str(_WORDS["duties"].get(member.role, "unknown"))
        work = "trains on its part of every batch" if len(self.members) > 1 else "trains alone"
        if self.likely.staged:
            work = "holds a stage of the model"
        elif member.role == "ps":
            work = "nothing: this strategy has no parameter servers"
        return f"{work} and saves checkpoints" if member in self.select("chief", "worker")[:1] else work

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "source": self.source,
            "strategy": self.strategy.class_name if self.strategy else None,
            "task": {"type": self.role, "index": self.index} if self.role else None,
            "tasks": [asdict(member) | {"does": self.duty(member)} for member in self._shown],
            "findings": [asdict(finding) for finding in self.findings],
        }

    @property
    def _shown(self) -> list[Member]:
        outside = self.role == Role.EVALUATOR and not self.select("evaluator")
        return [*self.members, *([Member("evaluator", self.index, "in no cluster")] if outside else [])]

    @plain_lines
    def lines(self, *, lint: bool) -> list[str]:
        """Format the explanation as lines of text; with `lint`, only the mistakes."""
        verdict = columns(finding.row for finding in self.findings) or [f"{self.source}: nothing is wrong"]
        if lint:
            return verdict
        if not self._shown:
            return [f"{self.source}: no cluster could be read", "", *verdict]
        tasks = [("TASK", "ADDRESS", "WHAT IT DOES")]
        for member in self._shown:
            mark = " (this task)" if (member.role, member.index) == (self.role, self.index) else ""
            tasks.append((member.name + mark, member.address, self.duty(member)))
        likely = "" if self.strategy else ", as far as TF_CONFIG shows"
        head = f"{self.source}: {counted(len(self.members), 'task')}, {self.likely.class_name}{likely}"
        kind = "served" if self.likely.served else "staged" if self.likely.staged else "summed"
        waits = _WORDS["waits"][kind if len(self.members) > 1 else "alone"].splitlines()
        return [head, *columns(tasks), *waits, "", *verdict]


def explain_text(text: str, source: str, strategy: str = "") -> Explained:
    """Return the explanation of a TF_CONFIG's text."""
    explained = Explained(source, strategies.requested(strategy) if strategy else None)
    _read(text, explained)
    for check in (_check_roles, _check_task, _check_addresses, _check_machines, _check_strategy):
        check(explained)
    return explained


def explain_cluster(cluster: ClusterSpec, source: str, task: str = "") -> Explained:
    """Return the explanation of a run's cluster, from the TF_CONFIG of one of its tasks."""
    member = cluster.task(task) if task else cluster.tasks[0]
    if (text := tf_config.dumps(cluster, member)) is None:
        return Explained(source, cluster.kind, [Member(member.role.value, 0, "in no cluster: TF_CONFIG is not set")])
    explained = explain_text(text, source, cluster.strategy)
    if not task:
        explained.members += [Member("evaluator", each.index, "in no cluster") for each in cluster.of(Role.EVALUATOR)]
        explained.role = ""
    return explained


def read_tf_config(name: str) -> str:
    """Return the text of a file, or of standard input for `-`."""
    if name == "-":
        return sys.stdin.read(MAX_BYTES)
    try:
        with settings.expanded("file", name).open("rb") as file:
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError as error:
        raise UsageError(f"--file {name!r}: {error.strerror}; name a file that holds a TF_CONFIG") from None


def _read(text: str, into: Explained) -> None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        detail = str(error)[:100]
        if isinstance(error, json.JSONDecodeError):
            detail = f"line {error.lineno}, column {error.colno}: {error.msg}" if text.strip() else "it is empty"
        fix = "correct it there"
        if not text.strip():
            fix = "set TF_CONFIG, or unset it where one process trains alone"
        elif "'" in text.replace('"', ""):
            fix = "use json.dumps, which writes double quotes, and give only the value, from { to }"
        into.fail("json", detail, fix)
        return
    if isinstance(value, str):
        into.fail("json", "the JSON is a string that holds JSON: it was encoded twice", "encode it once")
        _read(value, into)
    elif isinstance(value, dict):
        _read_cluster(value.get("cluster"), into)
        _read_task(value.get("task"), into)
    else:
        into.fail("json", f"it is {_kind(value)}", 'write {"cluster": {...}, "task": {...}}')


def _read_cluster(cluster: Any, into: Explained) -> None:
    if not isinstance(cluster, dict) or not cluster:
        into.fail("cluster", f"'cluster' is {_kind(cluster)}", 'write {"worker": ["host:port", ...]} with every task')
        return
    for role, addresses in cluster.items():
        if isinstance(addresses, list):
            numbered = dict(enumerate(addresses))
        elif isinstance(addresses, dict) and all(str(key).isdigit() for key in addresses):
            # TensorFlow also takes {"0": "host:port"}, for clusters that know only some of their tasks
            numbered = {int(key): address for key, address in addresses.items()}
        else:
            into.fail("cluster", f"{role!r} is {_kind(addresses)}", 'write a list: ["host:port", ...]')
            continue
        for index, address in numbered.items():
            if isinstance(address, str):
                into.members.append(Member(role, index, address))
            else:
                into.fail("address", f"{role} {index} is {_kind(address)}", 'write "host:port"')


def _read_task(task: Any, into: Explained) -> None:
    fix = 'add "task": {"type": "worker", "index": 0}, with each task\'s own type and index'
    if not isinstance(task, dict) or not isinstance(task.get("type"), str):
        into.fail("task", "it does not name the task that it is for", fix)
        return
    into.role, index = task["type"], task.get("index")
    if isinstance(index, int) and not isinstance(index, bool):
        into.index = index
    elif isinstance(index, str) and re.fullmatch(r"[0-9]{1,9}", index):
        into.warn("task", f"the index {index!r} is a string", f"write the number {index}")
        into.index = int(index)
    else:
        into.fail("task", f"the index is {_kind(index)}", fix)


def _kind(value: Any) -> str:
    if value is None:
        return "missing"
    return ("empty, " if value in ({}, [], "") else "") + _KINDS[type(value)]


def _check_roles(config: Explained) -> None:
    counts = Counter(member.role for member in config.members)
    for role in counts:
        if role not in list(Role):
            meant = "write 'chief'" if role == "master" else nearest(role.lower(), map(str, Role)).removeprefix("; ")
            config.fail("roles", f"TensorFlow 2 has no task type {role!r}", meant)
        indices = {member.index for member in config.select(role)}
        if indices != set(range(len(indices))):
            config.warn("roles", f"{role} lists only the indices {sorted(indices)[:8]}", "list all")
    if counts["evaluator"]:
        fix = "remove it from 'cluster'; only its own 'task' says that it is the evaluator"
        config.fail("evaluator", "the evaluator is listed in 'cluster', so every strategy waits for it", fix)
    chiefs = [f"{member.name} ({member.address})" for member in config.select("chief")]
    if len(chiefs) > 1:
        config.fail("chief", f"there are {len(chiefs)} chiefs: {', '.join(chiefs)}", "keep one; the others are workers")


def _check_task(config: Explained) -> None:
    role, index = config.role, config.index
    if role in ("", "evaluator") or not config.members:
        return
    indices = [member.index for member in config.select(role)]
    if not indices:
        known = ", ".join(dict.fromkeys(member.role for member in config.members))
        config.fail("task", f"this task is {role} {index}, and the cluster has only: {known}", f"add it as {role!r}")
    elif index not in indices:
        fix = f"use an index from 0 to {max(indices)}, or list this task's address under {role!r}"
        config.fail("task", f"the index {index} is out of range: there are {counted(len(indices), role)}", fix)


def _check_strategy(config: Explained) -> None:
    strategy, servers, workers = config.strategy, config.select("ps"), config.select("worker")
    name = strategy.class_name if strategy else ""
    if servers and not strategy:
        detail = "with 'ps' in the cluster, only ParameterServerStrategy can train; others wait for ps 0 indefinitely"
        config.warn("strategy", detail, "remove 'ps' for any other strategy; --strategy ps says that it is this one")
    elif servers and strategy and not strategy.served:
        detail = f"{name} has no parameter servers, and waits for ps 0 indefinitely"
        config.fail("strategy", detail, "remove 'ps', or train with ParameterServerStrategy")
    if servers and not workers:
        config.fail("strategy", "there are parameter servers and no worker", "add 'worker'")
    elif servers and not config.select("chief"):
        config.fail("strategy", "ParameterServerStrategy needs a chief, which hands out the steps", "add 'chief'")
    if strategy and strategy.served and not servers:
        config.fail("strategy", f"{name} needs parameter servers", "add 'ps'")
    if strategy and strategy.one_process and len(config.members) > 1:
        detail = f"{name} trains in one process, and {len(config.members)} tasks are listed"
        config.fail("strategy", detail, "unset TF_CONFIG, or use MultiWorkerMirroredStrategy")


def _check_addresses(config: Explained) -> None:
    by_address: dict[tuple[str, int | None], list[Member]] = {}
    for member in config.members:
        host = "localhost" if member.is_here else member.host.lower()
        by_address.setdefault((host, member.port), []).append(member)
        shown = f"{member.name}: {member.address[:100]!r}"
        if "://" in member.address:
            config.fail("address", f"{shown} has a scheme", "write only host:port")
            continue
        _check_name(config, member)
        if member.port is None or member.address.startswith(":"):
            config.fail("address", f"{shown} is not host:port", "write the host and the port on which it listens")
        elif not 0 < member.port < 65536:
            config.fail("port", f"{shown}: port {member.port} does not exist", GOOD_PORT)
        elif member.port < 1024:
            config.warn("port", f"{shown}: ports below 1024 need root", GOOD_PORT)
    for members in by_address.values():
        if len(members) > 1:
            detail = f"{_names(members)} have the same address {members[0].address}"
            config.fail("duplicate", detail, "give each its own")


def _check_name(config: Explained, member: Member) -> None:
    host = member.host
    if not host or host.startswith("["):
        return
    labels = host.removesuffix(".").split(".")
    is_name = len(host) <= 253 and all(map(_LABEL.fullmatch, labels)) and not labels[-1].isdigit()
    is_ipv4 = re.fullmatch(r"(\d{1,3}\.){3}\d{1,3}", host) and all(int(label) < 256 for label in labels)
    if not is_name and not is_ipv4:
        detail = f"{member.name}: {host[:100]!r} is neither a name that DNS takes nor an IPv4 address"
        config.fail("name", detail, "correct it; each part of a name has 1 to 63 letters, digits and '-' between them")
    elif "_" in host:
        detail = f"{member.name}: {host[:100]!r} has an underscore: containers resolve it, DNS and Kubernetes refuse it"
        config.warn("name", detail, "use '-' instead")


def _check_machines(config: Explained) -> None:
    for member in config.members:
        if member.host in _ANY_ADDRESS:
            detail = f"{member.name}: {member.host} is where a server listens, not where others reach it"
            config.fail("localhost", detail, "write the machine's name or address")
    here = [member for member in config.members if member.is_here]
    others = [member for member in config.members if not member.is_here]
    if here and others:
        detail = f"{_names(here)} on {here[0].host}, and {others[0].name} on {others[0].host}"
        fix = "write each machine's name or address"
        config.fail("localhost", f"{detail}: on every machine, localhost is that machine", fix)


def _names(members: Sequence[Member]) -> str:
    return ", ".join(member.name for member in members)
