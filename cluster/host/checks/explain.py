"""`invoke explain`: a cluster in words, from a run, from options of `up`, or from anybody's TF_CONFIG."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cluster.contract import strategies, tf_config
from cluster.contract.findings import Finding
from cluster.contract.spec import ClusterSpec, Role
from cluster.contract.strategies import Strategy
from cluster.host.checks import tf_config_lint
from cluster.host.checks.tf_config_lint import Member, Reading
from cluster.host.view.columns import columns
from cluster.system.errors import UsageError
from cluster.system.messages import counted, plain

MAX_BYTES = 2**20


@dataclass(frozen=True)
class Explained:
    """A cluster, what each of its tasks does, and what is wrong with it."""

    source: str
    """Where it comes from, in words."""
    reading: Reading
    strategy: Strategy | None
    """That trains on it; None where nothing says."""
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing must be corrected; warnings are no mistakes."""
        return all(finding.state != "failed" for finding in self.findings)

    @property
    def likely(self) -> Strategy:
        """The strategy, or the one that such clusters are made for."""
        if self.strategy:
            return self.strategy
        return strategies.get("ps" if self.reading.of("ps") else "multiworker" if self._several else "one")

    @property
    def _several(self) -> bool:
        return len(self.reading.members) > 1

    def does(self, member: Member) -> str:
        """Return what a task does, in words."""
        kind, leads = self.likely, self.leads(member)
        if member.role == Role.EVALUATOR:
            return "evaluates every new checkpoint, beside the cluster"
        if kind.served:
            return {
                "chief": "hands out the steps, and saves checkpoints; it trains nothing itself",
                "worker": "computes the steps that the chief hands out, on whole batches",
                "ps": "holds its part of the weights, and updates them",
            }.get(member.role, "unknown")
        if kind.staged:
            work = "holds a stage of the model"
        elif member.role == "ps":
            work = "nothing: this strategy has no parameter servers"
        else:
            work = "trains on its part of every batch" if self._several else "trains alone"
        return f"{work}, and saves checkpoints" if leads else work

    def leads(self, member: Member) -> bool:
        """Whether a task is the one that saves: the chief, or worker 0 where none is listed."""
        chiefs = self.reading.of("chief") or self.reading.of("master") or self.reading.of("worker")
        return member == chiefs[0] if chiefs else False

    def is_own(self, member: Member) -> bool:
        """Whether the TF_CONFIG was made for this task."""
        return (member.role, member.index) == (self.reading.role, self.reading.index)

    def to_json(self) -> dict[str, Any]:
        """Return the form of `invoke explain --json`."""
        return {
            "ok": self.ok,
            "source": self.source,
            "strategy": self.strategy.class_name if self.strategy else None,
            "task": {"type": self.reading.role, "index": self.reading.index} if self.reading.role else None,
            "tasks": [asdict(member) | {"does": self.does(member)} for member in self._shown],
            "findings": [asdict(finding) for finding in self.findings],
        }

    @property
    def _shown(self) -> list[Member]:
        beside = self.reading.role == Role.EVALUATOR and not self.reading.of("evaluator")
        return [*self.reading.members, *([Member("evaluator", self.reading.index, "in no cluster")] if beside else [])]

    def lines(self, *, lint: bool) -> list[str]:
        """Return it as lines of text: the cluster and what is wrong with it, or with `lint` only the latter."""
        found = columns(
            (each.state, each.check, "; ".join(filter(None, (each.detail, each.fix)))) for each in self.findings
        )
        verdict = [f"{self.source}: nothing is wrong"] if not self.findings else found
        return [plain(line) for line in (verdict if lint else [*self._drawn(), "", *verdict])]

    def _drawn(self) -> list[str]:
        members = self._shown
        if not members:
            return [f"{self.source}: no cluster could be read"]
        own = " (this task)"
        rows = [(each.name + (own if self.is_own(each) else ""), each.address, self.does(each)) for each in members]
        likely = "" if self.strategy else ", as far as TF_CONFIG shows"
        return [
            f"{self.source}: {counted(len(self.reading.members), 'task')}, {self.likely.class_name}{likely}",
            *columns([("TASK", "ADDRESS", "WHAT IT DOES"), *rows]),
            *self._story(),
        ]

    def _story(self) -> list[str]:
        """Return how the tasks work together."""
        if not self._several:
            return ["One process: no task waits for another, and TF_CONFIG may as well be unset."]
        if self.likely.served:
            return [
                "Workers and parameter servers wait for the chief, which may come last. Steps",
                "are asynchronous: no worker waits for another, a lost one is replaced alone,",
                "and two runs never give the same bits.",
            ]
        together = "Every task waits for all others, at the start and in each step:"
        if self.likely.staged:
            return [
                f"{together} activations and",
                "their gradients pass from stage to stage. One lost task ends the step of all.",
            ]
        return [f"{together} their gradients", "are summed by all-reduce. One lost task ends the step of all."]


def of_text(text: str, source: str, strategy: str = "", *, reach: bool = False) -> Explained:
    """Return the explanation of a TF_CONFIG's text.

    Args:
        text: the value of the environment variable.
        source: where it comes from, in words.
        strategy: that is to train on it; empty where that is not known.
        reach: whether to try every address.

    Raises:
        UsageError: there is no such strategy.
    """
    kind = strategies.requested(strategy) if strategy else None
    reading = tf_config_lint.read(text)
    found = tf_config_lint.lint(reading, kind)
    return Explained(source, reading, kind, tuple(found + (tf_config_lint.reach(reading) if reach else [])))


def of_cluster(cluster: ClusterSpec, source: str, task: str = "", *, reach: bool = False) -> Explained:
    """Return the explanation of one of our clusters, from the TF_CONFIG that one of its tasks gets.

    Raises:
        UsageError: the cluster has no such task.
    """
    member = cluster.task(task) if task else cluster.tasks[0]
    text = tf_config.dumps(cluster, member)
    if text is None:
        alone = Reading((Member(member.role.value, 0, "in no cluster: TF_CONFIG is not set"),))
        return Explained(source, alone, cluster.kind, ())
    explained = of_text(text, source, cluster.strategy, reach=reach)
    if task:
        return explained
    evaluators = tuple(Member("evaluator", each.index, "in no cluster") for each in cluster.of(Role.EVALUATOR))
    reading = explained.reading
    return replace(explained, reading=replace(reading, members=reading.members + evaluators, role=""))


def read_file(name: str) -> str:
    """Return the text of a file, or of standard input where it is called `-`.

    Raises:
        UsageError: it cannot be read.
    """
    if name == "-":
        return sys.stdin.read(MAX_BYTES)
    try:
        with Path(name).open("rb") as file:
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError as error:
        raise UsageError(f"--file {name!r}: {error.strerror}; name a file that holds a TF_CONFIG") from None
