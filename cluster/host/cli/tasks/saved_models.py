"""The tasks that use what a run has saved, in a process that may import TensorFlow."""

import os
import shlex
import sys
from pathlib import Path

from cluster.contract.run import provenance
from cluster.contract.run.folder import RunFolder
from cluster.host.cli.command_line import shell, task
from cluster.host.launch import folders, packages, startup
from cluster.host.runtime import registry
from cluster.host.runtime.payload import python_path, recorded_variables
from cluster.system import files
from cluster.system.errors import UsageError
from cluster.system.terminal import print_wait


@task(has_dry_run=True)
def evaluate(c, run=None, trust=False, json=False):
    """Evaluate a run's newest checkpoint on the whole test split, in one process without a strategy."""
    _run(c, run, "evaluate", *(["--json"] if json else []), trust=trust)


@task(has_dry_run=True)
def export(c, run=None, serving="", trust=False):
    """Write a run's newest checkpoint as a SavedModel to its folder export/."""
    _run(c, run, "export", *(["--serving", str(Path(serving).absolute())] if serving else []), trust=trust)


@task(has_dry_run=True)
def predict(c, run=None, image="", features="", trust=False):
    """Print what a run's exported model predicts for an image, or for an example of any features."""
    if bool(image) == bool(features):
        raise UsageError("expected --image or --features: an image file such as boot.png, or a JSON file of an example")
    option, path = ("--image", image) if image else ("--features", features)
    _run(c, run, "predict", option, str(Path(path).absolute()), trust=trust)


def _run(c, run, verb, *words, trust):
    folder = folders.find_run(run)
    needed = command_on(verb, folder, *words, trust=trust)
    if not c.config.run.dry:
        print_wait(f"{verb} {folder.name}: importing TensorFlow first")
    shell(c, quiet=True)(needed)


def command_on(verb: str, run: RunFolder, *words: str, trust: bool = False) -> str:
    """Return a command of `python -m train.saved_model` that reads a run's checkpoint or export, to be run in the root.

    The packages of the run are installed if they are not there. With `trust` the run may be somebody else's.
    """
    if not trust:
        provenance.check_trusted(run)
    for part in (run.checkpoints, run.export, run.path / "metrics"):
        files.refuse_links(part)  # TensorFlow would follow them
    if run.script:
        why = "it is the run of a script, and only the script knows its model and data"
        raise UsageError(f"{verb} {run.name}: {why}; do it there, or name a run of the built-in trainer")
    path = [*run.started.code_dirs]
    if named := run.started.requirements:
        path.append(str(packages.install_packages(Path(named), registry.LOCAL.python)))
    where = ["--run-dir", str(run.path), "--data-dir", str(folders.data_dir())]
    command = shlex.join([sys.executable, "-m", "train.saved_model", verb, *where, *words])
    path += python_path()
    variables = {"PYTHONPATH": os.pathsep.join(path)} if path else {}
    return startup.with_variables(recorded_variables(run.started.env) | variables, command)
