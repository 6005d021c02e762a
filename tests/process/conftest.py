"""Each file of this folder runs in a separate pytest: Keras is patched in it, and it sets its number of devices.

`DEVICES = 2` in a file gives its process two logical devices; without it TensorFlow is left as it is. `OWN_PROCESS=2
pytest FILE` runs the tests of a file directly, for a debugger.
"""

import ast
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import fast
from tests.support.measured import ENVIRONMENT, begin, output_of

VARIABLE = "OWN_PROCESS"

if int(os.environ.get(VARIABLE, "0")):
    from train import strategy

    strategy.configure_devices(int(os.environ[VARIABLE]))  # before anything else of TensorFlow


@functools.cache
def outcomes(path: Path, devices: int) -> list[tuple[str, str, str]]:
    """Run a file; return the name of each test, how it ended (`passed`, `failure`, `skipped`) and why."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"--basetemp={folder}/tmp"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {**ENVIRONMENT, VARIABLE: str(devices)}
        output = output_of(begin("pytest", *options, str(path), environment=environment))
        if not report.exists():
            return [("", "failure", output)]
        found = []
        for case in ElementTree.parse(report).iter("testcase"):
            ends = [(part.tag, part.text or "") for part in case if part.tag in ("failure", "error", "skipped")]
            found.append((case.get("name", ""), *(ends[0] if ends else ("passed", ""))))
        return found


class OwnProcess(pytest.File):
    """A file whose tests are found without importing it."""

    def collect(self) -> Iterator[pytest.Item]:
        tree, devices = ast.parse(self.path.read_text()), 0
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DEVICES":
                devices = ast.literal_eval(node.value)
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                test = InOwnProcess.from_parent(self, name=node.name)
                test.devices = devices
                yield test


class InOwnProcess(pytest.Item):
    """A test function, with all its parameters, as another pytest runs it."""

    devices: int

    def runtest(self) -> None:
        fast.leave_out("starts TensorFlow")
        mine = [each for each in outcomes(self.path, self.devices) if each[0].partition("[")[0] in ("", self.name)]
        if wrong := [f"{name}: {why}" for name, end, why in mine if end in ("failure", "error")]:
            pytest.fail("\n".join(wrong), pytrace=False)
        assert "passed" in {end for _, end, _ in mine}, mine


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> OwnProcess | None:
    return None if VARIABLE in os.environ else OwnProcess.from_parent(parent, path=module_path)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    if VARIABLE in os.environ:
        sys.stdout.flush()
        os._exit(0)  # TensorFlow's servers do not end
