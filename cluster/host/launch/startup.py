"""Starts a plan: prepares the data, the images and the run folder, and then starts every task.

`manifest.json` has the inputs of a run: enough to repeat it elsewhere and to name the differences, but no host path,
user name or secret. The chief adds its data and its environment (`train/telemetry/environment.py`).
"""

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.contract import kept_results, settings, tf_config, user_code
from cluster.contract.run import claim, owner, provenance, records
from cluster.contract.run.launch_records import Started
from cluster.contract.schema import Record, dictionary
from cluster.host.image import checkout, images, locks
from cluster.host.launch import metrics_server, mirroring, planning, teardown, user_files
from cluster.host.launch.folders import MIN_FREE_BYTES, check_folder, data_dir, runs_dir
from cluster.host.launch.plan import Plan
from cluster.host.runtime import mirror, registry, tensorboard
from cluster.host.runtime.base import Shell
from cluster.host.runtime.payload import Payload, data_words, python_path, recorded_variables, with_variables
from cluster.host.view import interrupts
from cluster.system import files
from cluster.system.errors import PrerequisiteError
from cluster.system.files import ROOT
from cluster.system.json_files import write_json
from cluster.system.messages import counted, short_path
from cluster.system.terminal import print_lines

SLOW_CALL_S = 5.0
"""A data function that takes longer is worth a hint, in seconds."""
SCHEMA = 1
CODE = ("cluster", "train")
"""The folders of this checkout that contain the code of a run."""


def start_planned(plan: Plan, sh: Shell, *, began: float) -> Plan:
    """Start every task of a plan, or of one under the next name if another command has taken it; return that plan."""
    while True:
        try:
            start(plan, sh, began=began)
            return plan
        except claim.Taken:
            if plan.request.name or plan.resumes:
                raise
        plan = planning.plan(plan.request)
        print_plan(plan)


def start(plan: Plan, sh: Shell, *, began: float) -> None:
    """Start every task of a plan, after preparing its data, image and run folder; raise Taken if the run is taken."""
    check_machine(plan)
    if plan.mirror:
        mirroring.check_mirror(plan.mirror, plan.run.name, plan.mirror_id)
    with claim.hold_claim(plan.run, "resumed" if plan.resumes else "started"):
        check_folder(plan.run, resumes=plan.resumes, replaces=plan.replaces)
        if owner.read_owner(plan.run):  # the run has ended, but a process may remain and hold a port
            teardown.remove_run(plan.run, sh)
        metrics_server.check_port(plan.options.count("metrics_port"))
        likely = {"onednn": plan.fast_kernels[0]} if plan.chooses_kernels else {}
        plan.runtime.anticipate(plan, plan.compose, plan.config | likely)
        version = "" if plan.data or plan.payload.script else _prepare_data(plan, sh)
        if version and plan.resumes:
            recorded = records.read_record(plan.run.data_version, dictionary(Record), {})
            if recorded.get("version", version) != version:
                print_lines("data: it differs from the data that the run began with, and with which it continues")
        stages = {} if plan.payload.script else plan.try_configuration()
        if hidden := [name for name in stages.get("missing", ()) if name in os.environ]:
            wanted, add = " and ".join(hidden), " --env ".join(hidden)
            print_lines(f"warning: your code looks for {wanted}, set here, but not for the tasks; add --env {add}")
        if plan.chooses_kernels:
            plan.config["onednn"], notes = plan.choose_kernels(stages.get("unverified", {}))
            if plan.config["onednn"] != plan.fast_kernels[0]:
                plan.runtime.anticipate(plan, plan.compose, plan.config)
            print_lines(*notes)
        plan.runtime.prepare(plan, sh)
        _write_folder(plan, began, stages.get("record"), version)
        _start_tasks(plan, sh)
        if plan.mirror:
            mirror.start_upload(plan.run)


def continue_run(plan: Plan, sh: Shell) -> None:
    """Start every task of a plan whose run was stopped for it. The caller holds the claim, and no task is left."""
    if not plan.request.trust:
        # Check again, since tasks ran until now and could change the records that the new note will cover.
        provenance.check_trusted(plan.run)
    provenance.note_rewriting(plan.run)
    if (stop := _start_generation(plan)) and stop.then == records.AfterStop.END:
        plan.run.request_stop(stop.by)  # another command's request, too late for the tasks that have ended
    _start_tasks(plan, sh, continues=True)


def _start_tasks(plan: Plan, sh: Shell, *, continues: bool = False) -> None:
    """Start the tasks, or end those that were started; the caller records the end of a run that `continues`."""
    try:
        plan.runtime.start(plan, sh)
        metrics_server.start(plan.run, plan.options.count("metrics_port"))
    except BaseException as error:
        with interrupts.ignored("ending what was started"):
            if not continues:
                state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                teardown.record_end(plan.run, state, " ".join(str(error).split()))
            left = teardown.try_remove(plan.run, sh)
        if left:  # printed, as the error raised is the first one
            print(left, file=sys.stderr)
        raise


def print_plan(plan: Plan) -> None:
    """Print the runtime, the notes and the data of a plan."""
    tasks = counted(len(plan.cluster.tasks), "task")
    data = [f"data: {plan.data}"] if plan.data else []  # otherwise the command that prepares it prints this
    print_lines(f"{plan.cluster.strategy_class} on {tasks} as {plan.why_runtime}", *plan.notes, *data)


def list_commands(plan: Plan) -> list[str]:
    """Return the commands that `start` runs, to show or paste. The last ones need the run folder."""
    prepare = [] if plan.payload.script else [_data_command(plan)]  # a script gets its own data
    found = [*prepare, *plan.runtime.commands(plan)]
    if plan.tensorboard_port != 0 and plan.runtime.board == tensorboard.CONTAINER:
        port = plan.tensorboard_port or tensorboard.PORT
        found.append(tensorboard.compose_command(runs_dir(), port, "up", "--detach", "tensorboard"))
    return found


def check_machine(plan: Plan, ending: int = 0) -> None:
    """Check memory, disk space, folders and the engine's GPUs for a plan; `ending` tasks will have ended by then."""
    plan.runtime.preflight(plan, ending)
    provenance.create_folder()
    try:
        runs_dir().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PrerequisiteError(f"runs folder {runs_dir()}: {error.strerror}; set RUNS_DIR to one you own") from error
    free = shutil.disk_usage(runs_dir()).free
    if free < MIN_FREE_BYTES:
        free_text = f"{free / 2**20:.0f} MiB are free for {short_path(runs_dir())}"
        needed = f"a run needs {MIN_FREE_BYTES / 2**20:.0f}"
        raise PrerequisiteError(f"{free_text}, {needed}; free space, or set RUNS_DIR to another disk")


def data_command(verb: str, name: str, *words: str, variables: Mapping[str, str] | None = None) -> str:
    """Return a command of `python -m train.data` for a dataset, by default a user's of the current folder."""
    if variables is None:
        variables = user_variables([str(Path.cwd()), *python_path()]) if ":" in name else {}
    return with_variables(variables, shlex.join(_data_words(verb, name, *words)))


def _data_words(verb: str, name: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "train.data", verb, "--name", name, "--data-dir", str(data_dir()), *words]


def user_variables(path: Sequence[str], env: Sequence[str] = ()) -> dict[str, str]:
    """Return the additional variables of a program that calls the user's functions, from the folders of `path`."""
    return recorded_variables(env) | {"PYTHONPATH": os.pathsep.join(path), user_code.FOLDER: str(Path.cwd())}


def _data_command(plan: Plan) -> str:
    verb, *words = data_words(plan.config)
    return data_command(verb, plan.config["dataset"], *words, variables=_data_variables(plan))


def _data_variables(plan: Plan) -> dict[str, str]:
    name, path = plan.config["dataset"], plan.payload.local_path()
    return user_variables(path or python_path(), plan.payload.env) if ":" in name or path else {}


def _prepare_data(plan: Plan, sh: Shell) -> str:
    """Prepare the data, once for all tasks; return its version if a user's function was called."""
    name, (verb, *words) = plan.config["dataset"], data_words(plan.config)
    if ":" not in name or verb == "shard":
        sh(_data_command(plan))
        return ""
    command = _data_words(verb, name, *words)
    environment = os.environ | _data_variables(plan) | settings.read_secrets(plan.payload.secrets)
    kept = kept_results.locate(data_dir(), command, environment)
    if plan.request.reuse_data and (known := kept_results.recall(kept)):
        print_lines(f"data: {known[0]['text']}; not called again, as nothing that it reads has changed")
        return str(known[0]["version"])
    start = plan.runtime.program_starter
    found = user_code.run(command, f"dataset {name}", "DATA_TIMEOUT_S", environment=environment, start=start, kept=kept)
    print_lines(f"data: {found['text']}")
    if found["seconds"] > SLOW_CALL_S and not plan.request.reuse_data:
        print_lines(f"data: it took {found['seconds']:.0f} s; --reuse-data skips it while what it reads is unchanged")
    return str(found["version"])


def start_tensorboard(port: int | None, requested: str, sh: Shell) -> int:
    """Start TensorBoard for all runs unless it is running, as the requested runtime does; return its port."""
    runtime, _ = registry.choose_runtime(requested)
    if runtime.board == tensorboard.CONTAINER and tensorboard.running_port(runs_dir()) is None:
        images.build_images(sh)
    runs_dir().mkdir(parents=True, exist_ok=True)
    return tensorboard.start(runs_dir(), port, runtime.board, sh)


def _write_folder(plan: Plan, began: float, stages: dict[str, Any] | None, version: str) -> None:
    if plan.replaces or plan.run.incomplete:
        plan.run.delete()
    if not plan.resumes:
        try:
            plan.run.path.mkdir()
            plan.run.unfinished.touch()
        except FileExistsError as error:  # a process without the claim has created it
            raise claim.Taken(f"run {plan.run.name!r} exists; choose another --name") from error
        except OSError as error:
            fix = "give write access, or set RUNS_DIR to one you own"
            raise PrerequisiteError(f"run folder {plan.run.path}: {error.strerror}; {fix}") from error
    try:
        _write_records(plan, began, stages)
        if version and not plan.resumes:  # the name may stand for other data when the tasks begin
            write_json(plan.run.data_version, {"version": version, "num_shards": 0})
    except BaseException:
        if not plan.resumes:  # nothing was started: free the name again
            with contextlib.suppress(OSError):
                plan.run.delete()
        raise
    files.remove(plan.run.unfinished)
    (runs_dir() / ".current").write_text(plan.run.name + "\n")


def _write_records(plan: Plan, began: float, stages: dict[str, Any] | None) -> None:
    if plan.resumes:
        provenance.note_rewriting(plan.run)
    plan.run.create()
    if plan.payload.script and (seen := plan.runtime.seen(plan.payload).script):
        user_files.lay_out(plan.payload.script, plan.run, plan.cluster, seen.parent)
    if plan.payload.packages:
        with files.open_file(plan.run.path / user_files.RESOLVED, "wb") as file:
            file.write((plan.payload.packages / user_files.RESOLVED).read_bytes())
    if plan.payload.script:
        data_dir().mkdir(parents=True, exist_ok=True)  # mounted by the tasks, though nothing was prepared
    user_files.copy_weights(plan.init, plan.run.init)
    write_json(plan.run.config, plan.config)
    if stages:
        write_json(plan.run.stages, stages)
    earlier = plan.previous.started if plan.previous else Started()
    started = Started(
        time=began,
        runtime=plan.runtime.name,
        requirements=str(plan.payload.requirements) if plan.payload.requirements else "",
        hang_timeout_s=plan.options.count("hang_timeout"),
        max_restarts=plan.options.count("max_restarts"),
        max_external_restarts=plan.options.count("max_external_restarts"),
        metrics_port=plan.options.count("metrics_port") or None,
        gpus={"gpus": plan.gpus.requested} if plan.gpus.ids else {},
        memory=plan.memory.requested,
        network=plan.network.requested,
        env=plan.payload.env,
        secrets=tuple(f"{name}={file}" for name, file in plan.payload.secrets.items()),
        code_dirs=tuple(str(folder) for folder in plan.payload.code_dirs),
        job=asdict(plan.job),
        tags=tuple(plan.request.tag) or earlier.tags,
        note=plan.request.note or earlier.note,
        mirror=plan.mirror,
        mirror_id=plan.mirror_id,
        **plan.elastic,
    )
    write_json(plan.run.control / "started.json", started.to_json())
    _start_generation(plan)


def _start_generation(plan: Plan) -> records.StopRequest | None:
    """Write the plan's cluster, begin a generation, and clear the previous one's records; return its stop request.

    The order matters: a command that watches the run waits while there is a request to stop for another size, and then
    for a generation that has just begun.
    """
    write_json(plan.run.cluster, plan.cluster.to_json())
    write_json(plan.run.compose, plan.compose)
    _write_manifest(plan)
    provenance.write_note(plan.run)
    plan.run.begin_generation(plan.run.generation + 1 if plan.resumes else 0, resumed=plan.resumes)
    if not plan.resumes:
        return None
    for record in (*(plan.run.path / "status").glob("*.json"), *plan.run.away("").glob("*")):
        files.remove(record)
    return plan.run.reopen()


def _write_manifest(plan: Plan) -> None:
    script = plan.payload.script
    named = {"script": script.name, "script_sha256": files.sha256(script)} if script else {}
    if weights := plan.config.get("init_from"):
        named["init_from"] = Path(weights).name
    value = {
        "schema": SCHEMA,
        "run": plan.run.name,
        "code": _code(),
        "locks": {
            f"{target}.lock": files.sha256(ROOT / locks.DIRECTORY / f"{target}.lock") for target in locks.TARGETS
        },
        "runtime": plan.runtime.name,
        "network": plan.network.name,
        "image": plan.runtime.image(plan),
        "config": plan.config | named,
        "init": {path.name: files.sha256(path) for path in sorted(plan.run.init.glob("*"))},
        "own_code": _own_code(plan.payload),
        "elastic": dict(plan.elastic),
        "cluster": plan.cluster.to_json(),
        "tf_config": {task.name: tf_config.render(plan.cluster, task) for task in plan.cluster.tasks},
    }
    before: dict[str, Any] = plan.run.load_manifest(value) if plan.resumes else value
    script_before = before.get("config", {}).get("script_sha256")
    if (before.get("own_code"), script_before) != (value["own_code"], named.get("script_sha256")):
        print_lines("code: your code has changed since this run last started, and the run continues with the new code")
    write_json(plan.run.manifest, value)


def _code() -> dict[str, Any]:
    """Return a hash of each code folder and, in a git checkout, the commit and a hash of its changes."""
    hashes = {f"{part}_sha256": _tree(ROOT / part) for part in CODE}
    commit = checkout.commit() or None
    return {"commit": commit, **({"changes_sha256": checkout.changes_sha256(*CODE)} if commit else {}), **hashes}


def _own_code(payload: Payload) -> dict[str, str]:
    """Return a hash of each folder of the user's modules, by its position and name, and of their requirements."""
    hashes = {f"{at}/{folder.name}": _tree(folder) for at, folder in enumerate(payload.code_dirs)}
    if payload.requirements:
        hashes[payload.requirements.name] = files.sha256(payload.requirements)
    return hashes


def _tree(folder: Path) -> str:
    return files.files_sha256(folder, _modules(folder))


def _modules(folder: Path) -> Iterator[str]:
    """Yield the names of a folder's Python files, without hidden files, virtual environments and dangling links."""
    for at, inside, others in os.walk(folder):
        inside[:] = [name for name in inside if not name.startswith(".") and not Path(at, name, "pyvenv.cfg").exists()]
        paths = (Path(at, name) for name in others if name.endswith(".py"))
        yield from (str(path.relative_to(folder)) for path in paths if path.is_file())
