"""What a supervisor imports before its tasks begin as its copies, in tests."""

import os
import signal
from pathlib import Path
from typing import Any

from cluster.contract.run.folder import RunFolder
from tests.support.waiting import wait_for

loaded_by: list[int] = []
"""The process that called `load`, in itself and in its copies; none in others."""


def load(config: dict[str, Any], strategy: str) -> None:
    """Take as long as the test wants, and fail or die where it wants."""
    run = RunFolder(Path(os.environ["RUN_DIR"]))
    wait_for(lambda: not (run.path / "import-lasts").exists(), "the end of the import")
    if (run.path / "import-fails").exists():
        raise ImportError("no such library")
    if (run.path / "import-kills").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    loaded_by.append(os.getpid())
