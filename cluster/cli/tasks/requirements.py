"""The tasks `requirements.*`: the locks."""

from __future__ import annotations

import shlex

from cluster.cli.command_line import shell, task
from cluster.image import locks


@task(upgrade="take the newest versions that the requirements allow (default: no)")
def lock(c, upgrade=False):
    """Renew requirements/*.lock from requirements/*.in."""
    for command in locks.lock_commands(upgrade=upgrade):
        shell(c)(shlex.join(command))
