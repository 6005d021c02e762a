"""Tasks of a Slurm job in containers of Apptainer, which sites allow where Docker is not: no daemon, no root.

The image brings Python and what the tasks import; their code is this checkout, as without a container. Agents and
programs keep the node's process numbers and its network, so that everything else stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from cluster.host.runtime.base import Workload
from cluster.system.errors import UsageError
from cluster.system.paths import ROOT

PYTHON = "python"
_SEPARATORS = ",:"
"""What `apptainer exec --bind` reads as the end of a path."""


def command(work: Workload) -> list[str]:
    """Return the words that start Python in the image.

    Raises:
        UsageError: the run needs packages that the image may lack, or a path cannot be mounted.
    """
    if work.payload.packages:
        raise UsageError("--requirements with --apptainer: install the packages into the image; leave one of them out")
    options = ["--no-home", *(["--nv"] if work.job.gpus_per_task else []), f"--pwd={ROOT}"]
    binds = [f"--bind={bind}" for bind in _binds(work)]
    # A user's own packages, and those of another Python, are none of the image's.
    alone = ["--env=PYTHONNOUSERSITE=1"]
    return ["apptainer", "--silent", "exec", *options, *alone, *binds, work.job.apptainer, PYTHON]


def _binds(work: Workload) -> Iterator[str]:
    reads = {ROOT, work.data_dir, *(folder for folder, _ in work.payload.mounts())}
    for path, mode in [*((path, "ro") for path in sorted(reads)), (work.run.path, "rw")]:
        if set(_SEPARATORS) & set(str(path)):
            raise UsageError(f"--apptainer: a path with a comma or a colon cannot be mounted: {path}; rename it")
        yield f"{path}:{path}:{mode}"
