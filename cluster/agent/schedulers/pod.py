"""The first process of a pod: finds or lays out the run folder, runs the agent, and exits with the run's result.

    python -m cluster.agent.schedulers.pod

The environment has RUN_DIR and RECORDS_DIR, and TASK or the TF_CONFIG of an operator.

Where `invoke up` starts the tasks, it writes the run folder first and reads the outcome last. In a cluster that starts
pods from manifests, no command does either. So the chief's pod lays out the folder on the shared volume, from the
records that the manifests mount at RECORDS_DIR, and the exit code tells a pod's controller how to proceed:

    0        the run succeeded
    1 to 4   the run failed, and restarting it would not help
    130      the run stopped because a pod was asked to end, and every task has saved at the same step; or this pod was
             asked to end while the run continues without it; or Kubernetes lost contact with it and has replaced it

A stopped run continues when its pods start again: the chief's pod reopens it, and the others wait for that.
"""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from cluster.agent.schedulers.lifecycle import await_layout, continue_run, result_code, run_agent
from cluster.contract import settings, spec, tf_config
from cluster.contract.run import launch_records, records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.joining import TaskCopy
from cluster.contract.run.launch_records import Started
from cluster.contract.spec import Role
from cluster.system import processes
from cluster.system.errors import EXIT_INTERRUPTED, EXIT_PEER_LOST, reports_errors
from cluster.system.json_files import write_json


@reports_errors
def main() -> int:
    """Run the task that the environment names; return the pod's exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_INTERRUPTED))  # until the agent asks for a checkpoint
    run, given = RunFolder(Path(os.environ["RUN_DIR"])), os.environ.get("TASK")
    task = given or _task_of_operator()
    if task == Role.CHIEF:
        prepare_folder(run, Path(os.environ["RECORDS_DIR"]))
    else:
        await_layout(run, settings.seconds("RENDEZVOUS_TIMEOUT_S"))
    if not given:
        _replace_tf_config(run, task)
    code = run_agent([sys.executable, "-m", "cluster.agent"], run, TaskCopy.register(run, task))
    if code in (None, EXIT_PEER_LOST):  # replaced by a newer pod, or asked to end while the run continues without it
        return EXIT_INTERRUPTED
    return processes.as_exit_code(code) or result_code(run)


def prepare_folder(run: RunFolder, given: Path) -> None:
    """Lay out the folder of a new run, or reopen a stopped run; leave any other run as it is.

    The folder `given` has the run's `cluster.json`, `config.json` and `started.json`. A reopened run takes the cluster
    from there and keeps its configuration.
    """
    cluster = records.read_record(given / "cluster.json", launch_records.cluster)
    if run.cluster.exists():
        if run.has_stopped:
            write_json(run.cluster, cluster.to_json())
            continue_run(run)
        return
    run.path.mkdir(parents=True, exist_ok=True)
    run.create()
    write_json(run.config, records.read_record(given / "config.json", launch_records.config))
    started = records.read_record(given / "started.json", Started.from_json)
    write_json(run.control / "started.json", replace(started, time=started.time or time.time()).to_json())
    run.begin_generation(0)
    write_json(run.cluster, cluster.to_json())


def _task_of_operator() -> str:
    """Return the name of the task in an operator's TF_CONFIG; without one, the task is a chief that runs alone."""
    text = os.environ.get("TF_CONFIG")
    if not text:
        return Role.CHIEF.value
    _, role, index = tf_config.parse(text)
    return spec.task_name(role, index)


def _replace_tf_config(run: RunFolder, name: str) -> None:
    """Set TASK, and replace an operator's TF_CONFIG, which lists the evaluator: a strategy would wait for it."""
    cluster = run.load_cluster()
    os.environ["TASK"] = name
    os.environ.pop("TF_CONFIG", None)
    if text := tf_config.dumps(cluster, cluster.task(name)):
        os.environ["TF_CONFIG"] = text


if __name__ == "__main__":
    sys.exit(main())
