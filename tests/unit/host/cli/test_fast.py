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
    "test_imports_first": "import train.model.models\ndef test_one(): pass\ndef test_two(): pass",
    "test_imports_late": "def test_one():\n    try: import keras\n    except Exception: pass\n    raise ValueError\n"
    "def test_two(): pass",
    "test_marked": "import pytest\n@pytest.mark.docker\ndef test_one(): pass\n@pytest.mark.long\ndef test_two(): pass\n"
    "@pytest.mark.slow\ndef test_three(): pass\ndef test_four(): pass",
}


@pytest.mark.slow
def test_only_what_needs_no_tensorflow_and_has_no_mark_runs(tmp_path):
    for name, lines in FILES.items():
        (tmp_path / f"{name}.py").write_text(lines)
    report = tmp_path / "report.xml"
    options = ["-c", "pyproject.toml", f"--rootdir={tmp_path}", "-p", "no:cacheprovider", f"--junitxml={report}"]
    outside = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "tests.fast", *options, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, timeout=300)
    ended: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, outcome = case.get("name", ""), next((part.tag for part in case), "passed")
        ended.setdefault(case.get("classname") or name, {})[name] = outcome
    assert ended == {
        "test_plain": {"test_one": "passed"},
        "test_imports_first": {"test_imports_first": "skipped"},  # a file that is left out counts as one test
        "test_imports_late": {"test_one": "skipped", "test_two": "passed"},
        "test_marked": {"test_four": "passed"},
    }
