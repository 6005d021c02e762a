"""The processes of a Slurm job: each task records its place, the chief writes the cluster, then the agents run.

    python -m cluster.agent.schedulers.slurm COMMAND

    task COMMAND ...      run a task of `srun`, with COMMAND as its agent
    stop                  the job's time is running out: every task saves and ends
    result                exit with 75 if the job is to be queued again, otherwise with how the run ended

The tasks' nodes are known only once the job has been allocated, and change with each requeue. So every task records the
address of its node and a free port, and the chief's task assembles the cluster from these records.

A lost task of an elastic run is replaced by a separate job, in which REPLACED_TASK names the task; such a job is never
queued again.
"""

import contextlib
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cluster.agent import elastic
from cluster.agent.schedulers.lifecycle import continue_run, result_code, run_agent
from cluster.contract import settings, tf_config
from cluster.contract.run import launch_records, membership, records
from cluster.contract.run.folder import TASK_LOST, RunFolder
from cluster.contract.run.joining import TaskCopy
from cluster.contract.run.launch_records import TaskAddress
from cluster.contract.run.records import AfterStop
from cluster.contract.spec import ClusterSpec, Role, Task
from cluster.system import errors, processes
from cluster.system.errors import EXIT_DONE, ClusterError, PrerequisiteError, TimedOut, UsageError
from cluster.system.json_files import write_json
from cluster.system.messages import COMMAND
from cluster.system.ports import free_ports
from cluster.system.waiting import wait_until

POLL_S = 0.1
LATER_S = 10.0
"""How much longer the other tasks wait for the chief than the chief waits for them."""
UNSEEN = "does not see the folder of the run; see logs/slurm.log there"
SCONTROL_S = 30.0
LOOK_S = 2.0
"""How often the chief checks for tasks to replace."""
REPLACED_TASK, REPLACED_ATTEMPT = "REPLACED_TASK", "ATTEMPT"
"""The variables of a replacement: which task it is, and the name of the folder of the job's attempt."""
TIME_LIMIT = "time limit"
"""The `by` of a stop request that is due to the job's time limit."""


@errors.reports_errors
def main(arguments: list[str]) -> int:
    """Run the subcommand that the first argument names; return the exit code."""
    run = RunFolder(Path(os.environ["RUN_DIR"]))
    if arguments[:1] == ["task"]:
        return _task(run, arguments[1:])
    if arguments == ["stop"]:
        if os.environ.get(REPLACED_TASK) not in membership.left_out(run):
            run.request_stop(TIME_LIMIT, then=AfterStop.REQUEUE)
        return 0
    if arguments == ["result"]:
        return result(run)
    print(__doc__, file=sys.stderr)
    return errors.EXIT_USAGE


def _task(run: RunFolder, command: list[str]) -> int:
    """Run the agent of one of the job's tasks until it ends by itself."""
    node = os.environ["SLURMD_NODENAME"]
    if shutil.which(command[0]) is None:
        raise PrerequisiteError(f"{node}: there is no {command[0]} on its PATH")
    if not os.access(run.control, os.W_OK):
        state = "is read-only" if run.control.exists() else "is not there"
        raise PrerequisiteError(f"{node}: {run.path} {state}; set RUNS_DIR to a folder that every node can write")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(errors.EXIT_PEER_LOST))  # until the agent asks for a checkpoint
    if REPLACED_TASK in os.environ and run.outcome:
        return EXIT_DONE  # the replacement came too late
    cluster, task = _join(run)
    os.environ |= {"TASK": task.name, "STOP_THEN": AfterStop.REQUEUE, "CLUSTER_JSON": str(places(run) / "cluster.json")}
    if config := tf_config.dumps(cluster, task):
        os.environ["TF_CONFIG"] = config
    os.environ |= gpus(task.role, os.environ.get("GPUS_PER_TASK", ""))
    copy = TaskCopy.register(run, task.name)
    os.environ["LOST_THEN"] = AfterStop.REQUEUE
    grows = task.role == Role.CHIEF and run.started.grow
    with Replacements(run, places(run)) if grows else contextlib.nullcontext():
        code = keep_agent(command, run, copy)
    is_spare = task.role == Role.WORKER and run.started.min_workers is not None
    if errors.EXIT_FAILED <= code <= errors.EXIT_TIMEOUT and not is_spare and not run.heartbeat(task.name):
        error = f"its agent did not start on {node}: {processes.describe_exit(code)}; logs/slurm.log there says why"
        run.end("failed", task=task.name, exit_code=code, error=error)
    if (request := run.stop_request) and request.by == TASK_LOST:
        # Queue the job again, once: its script may have died with a node, or be waiting for a node.
        with contextlib.suppress(FileExistsError):
            (places(run) / "queued-again").touch(exist_ok=False)
            processes.run(["scontrol", "requeue", places(run).name.partition(".")[0]], SCONTROL_S)
    return code


def _join(run: RunFolder) -> tuple[ClusterSpec, Task]:
    """Record this task's address; return the complete cluster and this task in it."""
    tasks, replaced = run.load_cluster().tasks, os.environ.get(REPLACED_TASK)
    names = [task.name for task in tasks]
    number = names.index(replaced) if replaced else int(os.environ["SLURM_PROCID"])
    if number >= len(tasks):
        raise UsageError(f"the job has more tasks than the {len(tasks)} of {run.name}; start it with `{COMMAND} up`")
    node = os.environ["SLURMD_NODENAME"]
    host = node_address(node)
    place = TaskAddress(node=node, host=host, port=task_port(host, number), job=os.environ["SLURM_JOB_ID"])
    write_json(places(run) / f"{names[number]}.json", place.to_json())
    cluster = assemble(run) if number == 0 else await_cluster(run, names[number])
    return cluster, cluster.task(names[number])


def gpus(role: Role, each: str) -> dict[str, str]:
    """Return the variables with which a training task sees the GPUs that Slurm allocated, and any other task none."""
    if not each or role not in (Role.CHIEF, Role.WORKER):
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    return {"GPUS_GIVEN": each, "TF_FORCE_GPU_ALLOW_GROWTH": "true"}


def places(run: RunFolder) -> Path:
    """Return the folder in which the tasks of this attempt of the job record their addresses."""
    own = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    return run.control / "slurm" / os.environ.get(REPLACED_ATTEMPT, own)


def node_address(node: str) -> str:
    """Return a node's address according to Slurm; raise PrerequisiteError if Slurm reports none."""
    code, printed, complained = processes.run(["scontrol", "--oneliner", "show", "node", node], SCONTROL_S)
    if code or not (found := re.search(r"\bNodeAddr=(\S+)", printed)):
        answer = (complained or printed).strip()[:200]
        raise PrerequisiteError(f"`scontrol show node {node}` names no address: {answer}")
    return found[1]


def task_port(host: str, number: int) -> int:
    """Return a free port of this node for a task; tasks of one job on one node search different ranges."""
    return free_ports(1, host, int(os.environ["SLURM_JOB_ID"]) * 521 + number * 31)[0]


def assemble(run: RunFolder) -> ClusterSpec:
    """Return the cluster with the addresses that its tasks record. If the run was under way, continue it.

    A worker of an elastic run that records no address keeps its name as host, which does not resolve. Raises TimedOut
    if any other task does not start in time.
    """
    cluster, folder, tasks = run.load_cluster(), places(run), []
    is_elastic = run.started.min_workers is not None
    deadline = time.monotonic() + settings.seconds("RENDEZVOUS_TIMEOUT_S")
    for task in cluster.tasks:
        find = partial(records.read_record, folder / f"{task.name}.json", TaskAddress.from_json, None)
        place = wait_until(find, deadline - time.monotonic(), POLL_S)
        if place is None and not (is_elastic and task.role == Role.WORKER):
            raise TimedOut(f"{task.name} did not start on its node, or {UNSEEN}")
        tasks.append(replace(task, host=place.host, port=place.port) if place else task)
    cluster = replace(cluster, tasks=tuple(tasks))
    if run.heartbeats() and (run.outcome is None or run.has_stopped):  # of an earlier attempt
        continue_run(run)
    write_json(folder / "cluster.json", cluster.to_json())
    return cluster


def await_cluster(run: RunFolder, name: str) -> ClusterSpec:
    """Return the cluster that the chief assembles, once it has this task's address; raise TimedOut otherwise."""
    folder = places(run)
    own = records.read_record(folder / f"{name}.json", TaskAddress.from_json)

    def complete() -> ClusterSpec | None:
        cluster = records.read_record(folder / "cluster.json", launch_records.cluster, None)
        task = cluster.task(name) if cluster else None
        return cluster if task and (task.host, task.port) == (own.host, own.port) else None

    # The chief of an elastic run waits as long for other tasks before it assembles a cluster without them.
    if cluster := wait_until(complete, settings.seconds("RENDEZVOUS_TIMEOUT_S") + LATER_S, POLL_S):
        return cluster
    raise TimedOut(f"the chief did not start on its node, or {UNSEEN}")


def keep_agent(command: Sequence[str], run: RunFolder, copy: TaskCopy) -> int:
    """Run the agent, and restart it whenever it is killed, with or without its container; return its exit code."""
    while (code := run_agent(command, run, copy)) is not None:
        if code >= 0 and code != processes.as_exit_code(-signal.SIGKILL):
            return code
    return EXIT_DONE


def result(run: RunFolder) -> int:
    """Return 75 if the job is to be queued again, because its run has not ended; otherwise the run's exit code."""
    if REPLACED_TASK in os.environ:
        return EXIT_DONE  # only the run's own job is queued again
    outcome = run.outcome
    if outcome is None and not (places(run) / "cluster.json").exists():
        absent = [task.name for task in run.load_cluster().tasks if not (places(run) / f"{task.name}.json").exists()]
        error = f"{', '.join(absent) or 'no task'} did not start; logs/slurm.log there says on which node, and why"
        run.end("failed", task="chief", exit_code=errors.EXIT_FAILED, error=error)
    elif outcome is None or (run.has_stopped and run.after_stop == AfterStop.REQUEUE):
        return errors.EXIT_PEER_LOST
    return result_code(run)


class Replacements:
    """Context manager that replaces the tasks that an attempt of an elastic job has lost with their nodes.

    Slurm removes a lost node from a job and does not replace it. So with `--grow` the first process of the chief's task
    queues a job of one task, on any node and with the script of the run's job, for each task that the run continues
    without. The new task records its address next to the others'; the chief's process adds it to the cluster, and the
    chief's agent takes the task in like any other that returns.
    """

    def __init__(self, run: RunFolder, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._folder, self._clock = run, folder, clock
        self._queued: dict[str, int] = {}
        """How often a replacement was queued for each task that is left out."""
        self._due: dict[str, float] = {}
        """When the next replacement of each task may be queued, by the clock."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Stop watching, and cancel the queued jobs."""
        self._ended.set()
        self._thread.join()
        for name in self._queued:
            self._withdraw(name)

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                self.look()
            except (ClusterError, OSError) as error:  # such as a shared folder that is unavailable
                print(f"replacements: {error}", file=sys.stderr, flush=True)

    def look(self) -> None:
        """Queue a replacement for each task that needs one, and admit the replacements that have started."""
        absent = membership.left_out(self._run) if self._run.outcome is None else frozenset[str]()
        for name in set(self._queued) - absent:  # the task may have returned by itself
            self._withdraw(name)
            del self._queued[name], self._due[name]
        for name in sorted(absent):
            self._admit(name)
            if self._clock() >= self._due.get(name, 0.0):
                self._queue(name)

    def _admit(self, name: str) -> None:
        path = self._folder / "cluster.json"
        cluster = records.read_record(path, launch_records.cluster)
        task = cluster.task(name)
        place = records.read_record(self._folder / f"{name}.json", TaskAddress.from_json, None)
        if place and (place.host, place.port) != (task.host, task.port):
            moved = replace(task, host=place.host, port=place.port)
            tasks = tuple(moved if each.name == name else each for each in cluster.tasks)
            write_json(path, replace(cluster, tasks=tasks).to_json())

    def _queue(self, name: str) -> None:
        """Queue a replacement unless one is queued or running, with a growing back-off while none is taken in."""
        times = self._queued.setdefault(name, 0)
        self._due[name] = self._clock() + elastic.patience_s(times + 1)
        listed = ["squeue", "--me", "--noheader", "--format=%i", f"--name={_job(name)}"]
        code, printed, _ = processes.run(listed, SCONTROL_S)
        if code or printed.strip():
            return
        self._queued[name] = times + 1
        job = [f"--job-name={_job(name)}", "--ntasks=1", "--nodes=1", "--no-requeue"]
        variables = f"--export=ALL,{REPLACED_TASK}={name},{REPLACED_ATTEMPT}={self._folder.name}"
        # `sbatch` would take this job's Slurm variables as options.
        unset = [f"--unset={name}" for name in os.environ if name.startswith(("SLURM", "SRUN", "SBATCH"))]
        command = ["env", *unset, "sbatch", *job, variables, str(self._run.control / "job.sh")]
        code, printed, complained = processes.run(command, SCONTROL_S)
        print(f"replacement of {name}: {(complained if code else printed).strip()}", file=sys.stderr, flush=True)

    def _withdraw(self, name: str) -> None:
        """Cancel a task's replacement while it is queued; a running one ends by itself."""
        processes.run(["scancel", "--state=PENDING", f"--jobname={_job(name)}"], SCONTROL_S)


def _job(task: str) -> str:
    """Return the name of a task's replacement job, for `squeue` and `scancel`."""
    return f"{os.environ['SLURM_JOB_NAME']}.{task}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
