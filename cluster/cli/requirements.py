"""The tasks `requirements.*`: the locks."""

from __future__ import annotations

import shlex

from invoke import task

from cluster.cli.command_line import shell, told
from cluster.image import locks


@task(auto_shortflags=False, help={"upgrade": "take the newest versions that the requirements allow (default: no)"})
@told
def lock(c, upgrade=False):
    """Renew requirements/*.lock from requirements/*.in."""
    for command in locks.lock_commands(upgrade=upgrade):
        shell(c)(shlex.join(command))
