"""The tasks `requirements.*`: the locks."""

from __future__ import annotations

import shlex

from cluster.cli.command_line import has_dry_run, shell, task
from cluster.image import locks


@task(upgrade="take the newest versions that the requirements allow (default: no)")
@has_dry_run
def lock(c, upgrade=False):
    """Renew requirements/*.lock from requirements/*.in."""
    for command in locks.lock_commands(upgrade=upgrade):
        shell(c)(shlex.join(command))
