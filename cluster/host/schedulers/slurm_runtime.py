"""The runtime of Slurm jobs: queued by `sbatch`, found by name, ended by `scancel`.

The job runs `cluster/agent/schedulers/slurm.py` on its nodes. Slurm's clients wait about 9 s for a controller that does
not answer. So after a failure, Slurm is not queried again for a while, however many runs a command examines.
"""

import contextlib
import shlex
import string
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

from cluster.contract.run import owner, records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.launch_records import TaskAddress
from cluster.host.image.engine import Availability
from cluster.host.nvidia import NO_DEVICE
from cluster.host.runtime import resources
from cluster.host.runtime.base import FaultInjector, Finding, ScheduledRuntime, Shell, Workload, path_digest
from cluster.host.runtime.payload import process_variables
from cluster.host.runtime.resources import Network
from cluster.system import processes
from cluster.system.errors import ClusterError, PrerequisiteError, TimedOut, UsageError
from cluster.system.files import ROOT, open_file
from cluster.system.messages import last_output_line
from cluster.system.waiting import wait_until

ANSWER_S = 30.0
CHECK_S = 5.0
"""Timeout of a query for `invoke doctor`: a client gives up only after about 9 s."""
RETRY_S = 60.0
NOT_INSTALLED = (126, 127)
"""Exit codes of a command that is not installed or not executable."""
IN_PROGRESS = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "SUSPENDED"}
    | {"SIGNALING", "STAGE_OUT", "STOPPED", "SPECIAL_EXIT", "PREEMPTED", "NODE_FAIL"}
)
"""States of a job that is running or queued, or will be queued again, as after preemption or the loss of a node."""
USABLE = frozenset({"idle", "allocated", "mixed", "completing", "planned", "reserved"})
UNAVAILABLE = "node configuration is not available"
TEMPORARY = ("contact", "timed out", "temporarily", "busy")
"""Parts of Slurm's error messages about temporary problems, which are not due to the job."""
SAVE_S = 120
"""How long before its time limit a job begins to save: longer than any task takes to save and end."""
LEAVE_S = 60
"""How long the other tasks may run once the first has ended, before Slurm ends them."""
SRUN_S = 60.0
END_S = 90.0
"""Timeout for a job to end after `scancel`: Slurm waits for KillWait, by default 30 s, before it kills tasks."""
POLL_S = 0.5


class Queue:
    """The queue of a Slurm site."""

    def __init__(self) -> None:
        self._failure: tuple[float, tuple[int, str, str]] | None = None
        """The time of the last failed query, and its result."""

    def jobs(self, name: str = "", *, parts: bool = False, states: Collection[str] = IN_PROGRESS) -> dict[str, str]:
        """Return the names of this user's jobs in `states` by job number, optionally only jobs called `name`.

        With `parts`, this includes its replacement jobs, whose names begin with `name` and a dot.
        """
        words = ["squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%j"]
        code, printed, complained = self._ask([*words, *([f"--name={name}"] if name and not parts else [])])
        if code:
            raise PrerequisiteError(f"Slurm does not answer: {last_output_line(complained)}")
        rows = (line.split("|", 2) for line in printed.splitlines() if line.count("|") >= 2)
        found = {number: called for number, state, called in rows if state in states}
        if parts:
            return {number: called for number, called in found.items() if f"{called}.".startswith(f"{name}.")}
        return found

    def describe(self, run: RunFolder) -> str:
        """Return the state of a run's newest job; empty while it runs, or once the controller has forgotten it."""
        command = ["squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r|%B", f"--name={job_name(run)}"]
        _, printed, _ = self._ask(command)
        if not (rows := [line.split("|") for line in printed.splitlines() if line.count("|") == 3]):
            return ""
        number, state, reason, node = max(rows, key=lambda row: int(row[0]) if row[0].isdecimal() else 0)
        why = "" if reason == "None" else f": {reason}"  # the scheduler has not looked at it yet
        if state in IN_PROGRESS:
            held = f"; `scontrol release {number}` lets it begin" if "held" in reason.lower() else ""
            return f"job {number} is queued{why}{held}" if state == "PENDING" else ""
        place = "" if node in ("", "n/a") else f" on {node}"  # its script may never have run
        ended = f"job {number} ended{place}: {state} ({reason})"
        if run.log("slurm").exists():
            return f"{ended}; see logs/slurm.log of the run"
        fix = "let every node see RUNS_DIR under that path"
        return f"{ended} before any task began, perhaps because a node cannot write {run.path}; {fix}"

    def nodes(self, timeout_s: float = ANSWER_S) -> tuple[int, str, str]:
        """Return the exit code of `sinfo`, its output, a line for each state of nodes, and its errors."""
        return self._ask(["sinfo", "--noheader", "--format=%D %T"], timeout_s)

    def refusal(self, options: Sequence[str]) -> str:
        """Return why Slurm would never accept a job with these options; empty if it would, now or later."""
        code, _, complained = processes.run(["sbatch", "--test-only", *options, "--wrap=true"], ANSWER_S)
        why = last_output_line(complained).removeprefix("sbatch: error: ").removeprefix("allocation failure: ")
        if not code or any(word in why for word in TEMPORARY):
            return ""
        if UNAVAILABLE in why and any(line.split()[-1] not in USABLE for line in self.nodes()[1].splitlines()):
            return ""  # the missing resource may be a node that is down
        return why

    def _ask(self, command: list[str], timeout_s: float = ANSWER_S) -> tuple[int, str, str]:
        if self._failure and time.monotonic() - self._failure[0] < RETRY_S:
            return self._failure[1]
        answer = processes.run(command, timeout_s)
        self._failure = (time.monotonic(), answer) if answer[0] not in (0, *NOT_INSTALLED) else None
        return answer


def batch_script(work: Workload) -> str:
    """Return the batch script of a run, whose nodes are not known yet."""
    step = shlex.join([sys.executable, "-m", "cluster.agent.schedulers.slurm"])
    options = [option.partition("=") for option in sbatch_options(work)]
    directives = [f"#SBATCH {name}{equals}{shlex.quote(text) if equals else ''}" for name, equals, text in options]
    payload = work.payload
    more = payload.environment(work.cluster, payload.local_path())
    given = {name: value for name, value in more.items() if value is not None}
    own = {"RUN_DIR": str(work.run.path), "DATA_DIR": str(work.data_dir)}
    gpus = {"GPUS_PER_TASK": work.job.gpus_per_task} if work.job.gpus_per_task else {"CUDA_VISIBLE_DEVICES": NO_DEVICE}
    elsewhere = {"TMPDIR", *payload.caller_variables}  # a node has another folder
    variables = process_variables() | given | own | gpus
    exported = [name for name in sorted(variables) if name not in elsewhere and not name.startswith("SLURM")]
    values = {
        "directives": "\n".join(directives),
        "exports": "\n".join(f"export {name}={shlex.quote(variables[name])}" for name in exported),
        "stop": shlex.quote(f"{step} stop"),
        # The job of an elastic run survives the loss of a node.
        "losses": "--no-kill --wait=0" if work.elastic else f"--wait={LEAVE_S}",
        "step": step,
        "agent": shlex.join([sys.executable, "-m", "cluster.agent", *payload.command()]),
    }
    return string.Template(Path(__file__).with_name("slurm_job.sh").read_text()).safe_substitute(values)


def sbatch_options(work: Workload) -> list[str]:
    """Return the options of `sbatch` for the job of a run."""
    job = work.job
    requested = {
        "job-name": job_name(work.run),
        "ntasks": str(len(work.cluster.tasks)),
        "nodes": job.nodes,
        "cpus-per-task": job.cpus_per_task,
        "gpus-per-task": job.gpus_per_task,
        "partition": job.partition,
        "account": job.account,
        "time": job.time,
        "signal": f"B:USR1@{SAVE_S}",
        "chdir": str(ROOT),
        "output": str(work.run.log("slurm")).replace("%", "%%"),
        "open-mode": "append",
        "export": "NONE",
    }
    words = [f"--{name}={value}" for name, value in requested.items() if value]
    return [*words, *(["--no-kill"] if work.elastic else []), "--requeue"]


def check_time(limit: str) -> None:
    """Check that a job can train before it saves; 0 means no limit, and Slurm itself refuses an invalid one."""
    days, dash, clock = limit.rpartition("-")
    parts = clock.split(":")
    units_s = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    if not all(part.isdecimal() for part in (days or "0", *parts)):
        return
    limit_s = int(days or 0) * 86_400 + sum(int(part) * unit_s for part, unit_s in zip(parts, units_s, strict=False))
    if 0 < limit_s <= SAVE_S:
        why = f"the run begins to save {SAVE_S} s before its time limit, and would never train"
        raise UsageError(f"--time {limit}: {why}; use --time 5 (minutes) or more")


class SlurmFaults(FaultInjector):
    """Injects faults into the tasks of a job, by signals on their nodes."""

    storm = frozenset({"kill", "pause", "corrupt"})
    refusals: ClassVar = dict.fromkeys(("partition", "slow", "oom"), "no signal does that; use --runtime docker")

    def signal(self, task: str, number: int, *whose: str) -> None:
        found = self.processes(task)
        words = [str(int(found[which]["pid"])) for which in whose]
        place = self._place(task)
        job = (place and place.job) or next(iter(Queue().jobs(job_name(self._run))), "")
        node = place.node if place else ""
        step = ["srun", f"--jobid={job}", "--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1"]
        code, _, complained = processes.run([*step, "kill", f"-{number}", *words], SRUN_S)
        if code:
            complaint = " ".join(complained.split())[:200]
            raise ClusterError(f"srun on {node or 'a node'} of job {job or 'none'}: {complaint}")

    def _place(self, task: str) -> TaskAddress | None:
        """Return the last address of a task, which may be a replacement in another job."""
        attempts = sorted((self._run.control / "slurm").glob(f"*/{task}.json"), key=lambda path: path.stat().st_mtime)
        return records.read_record(attempts[-1], TaskAddress.from_json) if attempts else None


class Slurm(ScheduledRuntime):
    """Tasks of one Slurm job, on nodes that share this checkout, its environment and the folders of runs and data."""

    name = "slurm"
    tasks = "tasks of a Slurm job"
    look_s = 5.0  # many users share a site's controller
    way_back = "use a login node"
    job_options = frozenset({"partition", "time", "account", "nodes", "cpus_per_task", "gpus_per_task"})
    injector = SlurmFaults

    def __init__(self) -> None:
        super().__init__()
        self._queue = Queue()

    def probe(self) -> Availability:
        code, printed, complained = self._queue.nodes()
        if code:
            return Availability(False, f"Slurm does not answer ({last_output_line(complained)})", self.way_back)
        return Availability(True, "queued by sbatch" if printed.strip() else "this cluster has no nodes now")

    def examine(self) -> list[Finding]:
        code, printed, complained = self._queue.nodes(CHECK_S)
        if code in NOT_INSTALLED:
            return []
        if code:
            fix = "scontrol ping; until then use another --runtime"
            return [Finding("slurm", "warning", last_output_line(complained), fix)]
        return [Finding("slurm", "ok", ", ".join(printed.split("\n")[:-1]) or "no nodes")]

    def network(self, requested: str, previous: str, *, way_out: str, serves: bool) -> Network:  # noqa: ARG002
        resources.check_network(requested)
        if requested == resources.PRIVATE:
            raise UsageError(f"--network {requested}: tasks of a Slurm job are in their nodes' network; leave it out")
        exposed = f"{resources.UNPROTECTED} all who reach the nodes reach them: see docs/guides/slurm.md"
        return Network(resources.HOST, requested or previous, exposed if serves else "")

    def render(self, work: Workload) -> dict[str, Any]:
        check_time(work.job.time)
        return {"runtime": self.name, "script": batch_script(work)}

    def preflight(self, work: Workload, ending: int = 0) -> None:  # noqa: ARG002  # another job
        """Check that Slurm would accept the job, according to Slurm itself; raise UsageError if not."""
        if why := self._queue.refusal(sbatch_options(work)):
            options = [f"--{name.replace('_', '-')} {value}" for name, value in vars(work.job).items() if value]
            raise UsageError(f"{' '.join(options) or 'the job'}: Slurm refuses it: {why}; see `sinfo --long`")

    def commands(self, work: Workload) -> list[str]:
        return [f"{_sbatch(work)} <<'SCRIPT'\n{self.render(work)['script']}SCRIPT"]

    def start(self, work: Workload, sh: Shell) -> None:
        path = work.run.control / "job.sh"
        with open_file(path, "wb") as file:
            file.write(self.render(work)["script"].encode())
        owner.create_owner(work.run, self.name)
        sh(f"{_sbatch(work)} {shlex.quote(str(path))}")

    def scheduler_status(self, run: RunFolder) -> str:
        return str(self.look(self._queue.describe, run))

    def cancel_queued(self, run: RunFolder) -> bool:
        name = job_name(run)
        with contextlib.suppress(PrerequisiteError):  # Slurm does not answer
            if self._queue.jobs(name, states={"PENDING"}):
                processes.run(["scancel", "--state=PENDING", f"--jobname={name}"], ANSWER_S)
                return not self._queue.jobs(name)  # it may have begun just before
        return False

    def scheduled_name(self, run: RunFolder) -> str:
        return job_name(run)

    def has_tasks(self, name: str) -> bool:
        return bool(self._queue.jobs(name))

    def scheduled(self) -> Collection[str]:
        return self._queue.jobs().values()

    def remove(self, run: RunFolder, sh: Shell, grace_s: int) -> None:
        name = job_name(run)
        wait_until(lambda: not self._queue.jobs(name), grace_s, POLL_S)
        if jobs := self._queue.jobs(name, parts=True):
            sh(shlex.join(["scancel", *(["--signal=KILL", "--full"] if not grace_s else []), *jobs]))
        if not wait_until(lambda: not self._queue.jobs(name, parts=True), END_S, POLL_S):
            raise TimedOut(f"job {' '.join(jobs)} of {run.name} does not end; `scontrol show job` says why")


def job_name(run: RunFolder) -> str:
    """Return the name of the run's job: readable, and unique for each run folder of a user."""
    return f"tf-cluster-{run.name}-{path_digest(run.path)}"


def _sbatch(work: Workload) -> str:
    """Return the command that queues a batch script, exporting the variables whose values are not stored in the run.

    It repeats the options of the script, over which the caller's SBATCH_* variables would win; the others are defaults.
    """
    names = work.payload.caller_variables
    return shlex.join(["sbatch", *sbatch_options(work), *([f"--export={','.join(names)}"] if names else [])])
