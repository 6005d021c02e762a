"""The fast set, `pytest -p tests.fast`: every test that starts neither TensorFlow, containers nor clusters.

Nothing lists these tests. Importing TensorFlow skips the test that does so, or the whole file where it is imported at
the top, and the helpers that start TensorFlow or a cluster in other processes skip as well. So a new file falls into
the right set by itself. A test that takes seconds for any other reason is marked `slow`; the fast set fails it
otherwise.
"""

import resource
import sys
from collections.abc import Generator, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

import pytest

LEFT_OUT = ("docker", "long", "slow")
TENSORFLOW = ("tensorflow", "keras", "tf_keras")
LIMIT_S = 8.0
"""Seconds of processor time that a fast test may take: four times what the longest takes, since the same work takes
more of it on a busy machine. What imports TensorFlow is found by the import, not by its time."""

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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    began = processor_s()
    yield
    if (took := processor_s() - began) > LIMIT_S:
        pytest.fail(f"took {took:.1f} s of processor time, expected at most {LIMIT_S:g}; mark it `slow`", pytrace=False)


def processor_s() -> float:
    """Return the processor time of this process and of those it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
