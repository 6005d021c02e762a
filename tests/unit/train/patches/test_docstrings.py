"""Every patch must name its defect, versions, test and the condition that disables it."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.measured import ROOT

PATCHES = [path for path in (ROOT / "train" / "patches").glob("*.py") if path.stem != "__init__"]


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch_must_name_its_defect_versions_test_and_condition(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    for part in ("Defect: ", "Versions: ", "Test: ", "Not applied: "):
        assert re.search(f"^{part}", docstring, re.MULTILINE), part
    found = re.search(r"^Test: ([^:\n]+)(?:::(\w+))?$", docstring, re.MULTILINE)
    assert found is not None
    file, name = found.groups()
    assert f"def {name or 'test_'}" in (ROOT / file).read_text()
