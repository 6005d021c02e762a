"""Helpers of the tests of launching, from a request to a started run; the fixtures are in `conftest.py`."""

from typing import Any

import pytest

from cluster.contract import spec
from cluster.contract.run.folder import RunFolder
from cluster.host.launch import planning
from cluster.host.nvidia import Placement
from cluster.host.options.request import Request
from cluster.host.runtime.base import Workload
from cluster.host.runtime.payload import Payload
from cluster.host.runtime.resources import Memory, Network
from cluster.system.errors import ClusterError

CONFIG = {"preset": "fashion_mnist", "dataset": "fashion_mnist", "global_batch": 192}

WORKING_ENGINE = (
    'case "$1" in info) echo \'"26.1.5"\';; compose) echo 2.26.1;; buildx) echo sha256:0;; *) exit 1;; esac'
)
"""A fake `docker` as a shell script, whose engine and registry answer."""


def workload(run: RunFolder, **more: Any) -> Workload:
    """Return the workload of a run, by default of a chief and a worker."""
    given: dict[str, Any] = {"cluster": spec.build(workers=1), "data_dir": run.path.parent, "payload": Payload()}
    given |= {"gpus": Placement(), "memory": Memory(), "network": Network()}
    return Workload(run=run, **given | more)


def refusal(requested: Request) -> ClusterError:
    """Return the one-line error with which planning refuses a request."""
    with pytest.raises(ClusterError) as refused:
        planning.plan(requested)
    assert 1 == len(str(refused.value).splitlines())
    return refused.value


class Commands(list[str]):
    """A fake shell that records its commands."""

    def __call__(self, command: str) -> None:
        self.append(command)


def no_shell(command: str) -> None:
    """A fake shell that fails, for tests in which no command may run."""
    pytest.fail(f"nothing is to be run: {command}")
