"""The commands that evaluate, export and predict with what a run has saved, in a process that may import TensorFlow."""

from __future__ import annotations

import shlex
import sys

from cluster.launch import folders
from cluster.run import provenance
from cluster.run.folder import RunFolder
from cluster.system import files


def command(verb: str, run: RunFolder, *words: str, trust: bool = False) -> str:
    """Return the command; run it from the root.

    Args:
        verb: a command of `python -m train.saved`.
        run: whose checkpoint or export is read.
        words: more options of that command.
        trust: whether the run may be somebody else's.

    Raises:
        UsageError: the run is not this user's, or not as it was left.
        OSError: there is a link in what it reads or writes.
    """
    if not trust:
        provenance.check(run)
    for part in (run.checkpoints, run.export, run.path / "metrics"):
        files.refuse_links(part)  # TensorFlow would follow them
    data = ["--data-dir", str(folders.data_dir())]
    return shlex.join([sys.executable, "-m", "train.saved", verb, "--run-dir", str(run.path), *data, *words])
