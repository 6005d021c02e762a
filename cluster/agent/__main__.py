"""The first process of every task: runs the agent of the task that the environment names.

python -m cluster.agent [-- COMMAND ...]               RUN_DIR, TASK and TF_CONFIG in the environment
python -m cluster.agent --script FILE [ARGUMENT ...]   the same for a script, see task_process.py
"""

import json
import os
import sys
from pathlib import Path

from cluster.agent.agent import Agent
from cluster.agent.run_view import RunView
from cluster.agent.task_process import Script
from cluster.contract import settings, tf_config
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.joining import TaskCopy
from cluster.contract.run.launch_records import TRAINER_IMPORTS
from cluster.system.errors import UsageError, reports_errors
from cluster.system.messages import COMMAND


@reports_errors
def main(arguments: list[str]) -> int:
    """Run the agent; return the exit code."""
    missing = [name for name in ("RUN_DIR", "TASK") if name not in os.environ]
    if missing:
        raise UsageError(f"{' and '.join(missing)} not set: an agent is started by `{COMMAND} up`, which sets them")
    run_dir, task = os.environ["RUN_DIR"], os.environ["TASK"]
    os.environ |= settings.read_secrets(json.loads(os.environ.get(settings.SECRET_FILES, "{}")))
    if text := os.environ.get("TF_CONFIG"):
        tf_config.parse(text)
    timeout_s = settings.seconds("RENDEZVOUS_TIMEOUT_S")
    folder = RunFolder(Path(run_dir))
    run = RunView(folder, TaskCopy.from_environment(folder, task))
    if arguments[:1] == ["--script"]:
        return Agent(run, task, [sys.executable, *arguments[1:]], timeout_s, kind=Script).main()
    if arguments[:1] == ["--"]:
        return Agent(run, task, arguments[1:], timeout_s).main()
    trainer = [sys.executable, "-m", "train", "--run-dir", run_dir]
    return Agent(run, task, trainer, timeout_s, imports=TRAINER_IMPORTS).main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
