"""What docs/security.md promises has the tests that it names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]


def test_every_protection_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    table = text.partition("## Protections and their tests")[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("|")][2:]
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(rows) > 15
    for protection, named in rows:
        names = re.findall(r"`([^`]+)`", re.sub(r"\(.*?\)", "", named))
        assert names, protection
        for name in names:
            assert name in files or f"def test_{name}(" in tests, name
