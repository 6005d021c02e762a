"""The project's files: its metadata, the workflow that runs the README's commands, and the settings of editors."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from ruamel.yaml import YAML

import tasks
from cluster.host.runtime import tensorboard
from cluster.system.files import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WRITES = {"security.yml": {"security-events"}, "release.yml": {"contents", "packages", "id-token", "attestations"}}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
"""`tests/e2e/test_installed.py` builds a wheel from the file, and so validates it."""


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in YAML(typ="safe").load(workflow)["jobs"].values() for step in job.get("steps", [])]


def test_the_command_has_the_version_of_the_metadata():
    done = subprocess.run([sys.executable, ROOT / "tasks.py", "--version"], capture_output=True, text=True)
    assert f"tf-cluster {PROJECT['version']}\n" == done.stdout


def test_metadata_names_the_python_versions_that_make_accepts():
    first, last = re.findall(r"\((\d), (\d+)\)", (ROOT / "Makefile").read_text())
    supported = [f"{first[0]}.{minor}" for minor in range(int(first[1]), int(last[1]) + 1)]
    assert supported == [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if "Python :: 3." in name]
    every = [f"3.{minor}" for minor in range(30)]
    assert supported == [version for version in every if version in SpecifierSet(PROJECT["requires-python"])]


def test_ci_runs_every_make_command_of_the_readme_that_needs_no_site():
    commands = re.findall(r"^\$ (make [\w-]+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    run = [step.get("run") for workflow in WORKFLOWS for step in steps(workflow)]
    assert {"make up", "make test"} <= set(commands)
    assert set(commands) <= set(run)


def test_workflows_write_what_they_are_for_alone_and_pin_actions_to_commits():
    for workflow in WORKFLOWS:
        document = YAML(typ="safe").load(workflow)
        assert {"contents": "read"} == document["permissions"]
        given = [access for job in document["jobs"].values() for access in job.get("permissions", {}).items()]
        assert {name for name, access in given if access != "read"} == WRITES.get(workflow.name, set())
        assert "secrets." not in workflow.read_text()
        used = [step["uses"] for step in steps(workflow) if "uses" in step]
        assert used
        assert [] == [name for name in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name)]


def test_a_dev_container_is_set_up_by_make_and_shows_tensorboard():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    setup, prepare = container["postCreateCommand"].split(" && ")
    assert "make setup" == setup
    assert prepare.split()[3] in tasks.ns.task_names
    assert [tensorboard.PORT] == container["forwardPorts"]
