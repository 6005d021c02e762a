"""An agent that imports what its programs need, as one in a container: its arguments are the module and the program."""

import os
import sys
from pathlib import Path

from cluster.agent.agent import Agent
from cluster.agent.run_view import RunView
from cluster.contract.run.folder import RunFolder

if __name__ == "__main__":
    module, *program = sys.argv[1:]
    sys.exit(
        Agent(RunView(RunFolder(Path(os.environ["RUN_DIR"]))), os.environ["TASK"], program, 60.0, imports=module).main()
    )
