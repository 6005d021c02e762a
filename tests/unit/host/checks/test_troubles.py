"""The documentation: its links lead somewhere, and what it says of errors and of tests is true."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.system.errors import EXIT_FAILED, EXIT_PREREQUISITE
from cluster.system.files import ROOT

PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"
ROWS = re.findall(r"^\| `(.*?)` \| .+ \| .+ \|$", PAGE.read_text(), re.MULTILINE)
FILLED_IN = {
    "tasks need about",
    "missing worker",
    "is being started by process",
    "start the engine, then invoke down again",
    "no source has fashion",
    "loss is nan at step",
    "Address already in use",
    "times without progress after step",
    "s servers have no authentication, and all who reach this machine reach them",
    "json is damaged",
}
"""Parts of rows in which the program's text has a value."""


def texts() -> str:
    """Return every text of the sources, with `...` for the values in it."""
    found = [(ROOT / "Makefile").read_text()]
    for path in [*(ROOT / "cluster").rglob("*.py"), *(ROOT / "train").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values))
            elif isinstance(node, ast.Constant):
                found.append(str(node.value))
    return "\n".join(found).replace("`", "")


def test_every_row_has_the_words_of_a_message():
    pieces = {piece.strip(" ,") for row in ROWS for piece in re.split(r"\.\.\.|[^a-zA-Z ,]", row)}
    source = texts()
    assert FILLED_IN == {piece for piece in pieces if " " in piece and piece not in source}


OLD = "import sys; sys.version_info = (3, 9, 18); sys.version = '3.9.18 (main)'; exec(sys.argv[1])"


@pytest.mark.parametrize(
    ("python", "target", "row", "expected"),
    [
        ('[ "$1" = -c ] && exit 0\nexit 1', ".venv/bin/python", "venv failed", EXIT_PREREQUISITE),
        (f'exec {sys.executable} -c {shlex.quote(OLD)} "$2"', ".venv/bin/python", "is 3.9.18", EXIT_PREREQUISITE),
        ('echo "ERROR: ProxyError(Cannot connect to proxy.)"; exit 1', ".venv/.host", "HTTPS_PROXY", EXIT_FAILED),
    ],
)
def test_make_refuses_as_the_table_says(tmp_path, python, target, row, expected):
    program = tmp_path / "python3"
    program.write_text(f"#!/bin/bash\n{python}\n")
    program.chmod(0o755)
    if target == ".venv/.host":
        (tmp_path / ".venv" / "bin").mkdir(parents=True)
        (tmp_path / ".venv" / "bin" / "python").symlink_to(program)
        (tmp_path / "requirements").symlink_to(ROOT / "requirements")
    command = ["make", "--no-print-directory", "-f", str(ROOT / "Makefile"), "-C", str(tmp_path), f"PYTHON={program}"]
    environment = os.environ | {"LC_ALL": "C", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([*command, target], env=environment, capture_output=True, text=True, timeout=60)
    printed = done.stdout + done.stderr
    (line,) = re.findall(r"^error: .*$", printed, re.MULTILINE)
    (sees,) = (each for each in ROWS if row in each)
    assert re.fullmatch(".*".join(map(re.escape, sees.split("..."))), line)
    assert [str(expected)] == re.findall(r"Error (\d+)", printed)


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.needs("git")
def test_every_link_of_the_documentation_leads_to_a_file_and_a_heading():
    broken = []
    for page in tracked_files():
        if page.suffix != ".md" or page.is_relative_to(ROOT / ".github"):
            continue
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            if ":" in target:
                continue
            path = (page.parent / target) if target else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert [] == broken


@pytest.mark.needs("git")
def test_files_that_the_code_and_the_documentation_name_exist():
    missing = []
    for path in tracked_files():
        names = []
        if path.suffix in {".py", ".yml", ".yaml", ".md", ".toml"} or path.name == "Dockerfile":
            names += re.findall(r"(?<![\w/.:])docs/[\w/-]+\.(?:md|jsonl|png)", path.read_text())
        if path == ROOT / "README.md" or (path.suffix == ".md" and path.is_relative_to(ROOT / "docs")):
            names += re.findall(r"`((?:cluster|train|tests|compose|docker|benchmarks)/[\w./-]+)`", path.read_text())
        missing += [f"{path.relative_to(ROOT)}: {name}" for name in names if not (ROOT / name).exists()]
    assert [] == missing


def test_every_protection_names_tests_that_exist():
    text = (ROOT / "docs" / "reference" / "security.md").read_text()
    table = text.partition("## Protections and their tests")[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("|")][2:]
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(rows) > 15
    for protection, named in rows:
        names = re.findall(r"`([^`]+)`", named)
        assert names, protection
        assert set(names) <= files
