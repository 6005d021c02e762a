"""What is reported of the nodes of a queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.checks import nodes
from cluster.errors import UsageError


def said(node: str, **more: Any) -> dict[str, Any]:
    return {"node": node, "time": 100.0, "data": True, "unreached": "", **more}


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        ([said("n1"), said("n2")], {}),
        ([said("n1")], {"nodes": "failed"}),
        ([], {"nodes": "failed"}),
        ([said("n1"), said("n2", data=False)], {"data on nodes": "failed"}),
        ([said("n1"), said("n2", time=109.0)], {"clocks": "warning"}),
        ([said("n1", unreached="missing worker-0"), said("n2")], {"network of nodes": "failed"}),
    ],
)
def test_what_a_node_lacks_is_reported_with_its_fix(answers: list[dict[str, Any]], wrong: dict[str, str]) -> None:
    found = nodes.judge(["n1", "n2"], answers, "")
    assert wrong == {each.check: each.state for each in found if each.state != "ok"}
    assert all(each.fix for each in found if each.state != "ok")


def test_only_what_has_nodes_is_examined(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--runtime local"):
        nodes.examine("local", tmp_path, tmp_path)
