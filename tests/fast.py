"""The fast set, `pytest -p tests.fast`: every test that starts neither TensorFlow, containers nor clusters.

Nothing lists these tests. Importing TensorFlow skips the test that does so, or the whole file where it is imported at
the top, and the helpers that start TensorFlow or a cluster in other processes skip as well. So a new file falls into
the right set by itself. A test that takes seconds for any other reason is marked `slow`; the list of the slowest tests
that ends each session shows which. Nothing fails for its time, which depends on the machine.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

import pytest

LEFT_OUT = ("docker", "long", "slow")
TENSORFLOW = ("tensorflow", "keras", "tf_keras")
_active = False


class NoTensorFlow(MetaPathFinder):
    """Skips the test or the file that imports TensorFlow."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname in TENSORFLOW:
            leave_out("imports TensorFlow")


def leave_out(reason: str) -> None:
    """Skip the test in the fast set."""
    if _active:
        pytest.skip(f"not in the fast set: {reason}", allow_module_level=True)


def pytest_configure(config: pytest.Config) -> None:
    global _active
    _active = True
    sys.meta_path.insert(0, NoTensorFlow())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in LEFT_OUT)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
