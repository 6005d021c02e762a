"""What `make test-fast` leaves out, and that it finds out by itself."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[4]
FILES = {
    "test_plain": "def test_one(): pass",
    **{
        f"test_imports_0{number}": f"import {module}\ndef test_one(): pass\ndef test_two(): pass"
        for number, module in enumerate(["tensorflow", "keras", "tf_keras", "tensorflow.python", "train.model.models"])
    },
    "test_imports_late": """
def test_one():
    try:
        import tensorflow
    except Exception:
        pass
    raise ValueError
def test_two(): pass
""",
    "test_marked": """
import pytest
@pytest.mark.docker
def test_one(): pass
@pytest.mark.long
def test_two(): pass
@pytest.mark.slow
def test_three(): pass
def test_four(): pass
""",
}


@pytest.fixture
def ended(tmp_path) -> dict[str, dict[str, str]]:
    """How the tests of each file end in the fast set; a file that is left out counts as one test with its name."""
    folder = tmp_path / "new"
    folder.mkdir()
    for name, lines in FILES.items():
        (folder / f"{name}.py").write_text(lines)
    report = folder / "report.xml"
    options = ["-c", "pyproject.toml", f"--rootdir={folder}", "-p", "no:cacheprovider", f"--junitxml={report}"]
    outside = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "tests.fast", *options, str(folder)]
    subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, timeout=300)
    found: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, outcome = case.get("name", ""), next((part.tag for part in case), "passed")
        found.setdefault(case.get("classname") or name, {})[name] = outcome
    return found


def test_only_what_needs_no_tensorflow_and_has_no_mark_runs(ended):
    expected = {name: {name: "skipped"} for name in FILES if name.startswith("test_imports_0")}
    expected["test_plain"] = {"test_one": "passed"}
    expected["test_imports_late"] = {"test_one": "skipped", "test_two": "passed"}
    expected["test_marked"] = {"test_four": "passed"}
    assert expected == ended
