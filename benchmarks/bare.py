"""The training program of a chief alone: no agent, no heartbeat after the first, no checkpoint but the last.

python -m benchmarks.bare RUN_DIR
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cluster.contract.run import heartbeat
from cluster.contract.run.folder import RunFolder

if __name__ == "__main__":
    heartbeat.HEARTBEAT_S = 10**6
    from train.__main__ import train

    os._exit(train(RunFolder(Path(sys.argv[1]))))
