"""Projects: the task that creates one in a folder, and its tests."""

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NoReturn

from invoke import Exit

from cluster.contract import settings
from cluster.host.cli.command_line import task
from cluster.system.errors import UsageError, nearest
from cluster.system.files import ROOT
from cluster.system.messages import COMMAND, either, short_path

EXAMPLES = ROOT / "examples"
KINDS = ("images", "table", "text", "segmentation", "tagging", "autoencoder", "recommender", "forecast")
_FILES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
"""The files of a project that runs a script, by name."""


@task(kinds=either(KINDS), kind=KINDS[0])
def new(c, folder=None, kind="", script=""):
    """Create a project that trains with one command: model, data, options, test and README."""
    if not folder:
        raise UsageError(f"the folder is missing: `{COMMAND} new my-project`")
    if kind and script:
        raise UsageError("--kind and --script: choose one of them")
    if kind and kind not in KINDS:
        raise UsageError(f"--kind {kind!r}: expected {', '.join(KINDS)}{nearest(kind, KINDS)}")
    target, source = settings.expanded("folder", folder), settings.expanded("script", script)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"{folder!r} exists and is not an empty folder; choose another name")
    if script and not source.is_file():
        raise UsageError(f"--script {script!r}: no such file")
    command = COMMAND if target.resolve().is_relative_to(ROOT) else "tf-cluster"  # elsewhere invoke finds no tasks
    if script:
        values = {"name": target.resolve().name, "script": source.name, "command": command}
        files = {source.name: source.read_bytes()}
        files |= {name: text.format(**values).encode() for name, text in _FILES.items()}
    else:
        kind = kind or KINDS[0]
        files = {path.name: path.read_bytes() for path in sorted((EXAMPLES / kind).iterdir()) if path.is_file()}
        readme = files["README.md"].decode().replace(f"cd examples/{kind}", f"cd {target.name}")
        files["README.md"] = readme.replace("tf-cluster", command).encode()
    target.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (target / name).write_bytes(content)
    print(f"wrote {', '.join(files)} to {short_path(target)}")
    if command != COMMAND and not shutil.which(command):
        print(f"`make install` in {ROOT} makes {command} a command for any folder")
    print(f"next: cd {shlex.quote(short_path(target))} && {command} up --file run.toml")


def test(select: str = "") -> NoReturn:
    """Run the tests of the project in the current folder in this environment, as `python -m unittest` does."""
    command = [sys.executable, "-m", "unittest", *(["-k", select] if select else [])]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    raise Exit(code=subprocess.run(command, env=quiet | os.environ, check=False).returncode)
