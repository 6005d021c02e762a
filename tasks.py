"""The tasks: `invoke --list` shows them, `invoke --help TASK` one of them. What they do lives in `cluster/`.

Here are those without a namespace; `image.build` and the like are in `cluster/cli/`.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from pathlib import Path

from invoke import Collection, Exit, task

from cluster import spec
from cluster.checks import doctor as checks
from cluster.checks import rerun as repeating
from cluster.checks import verify as verification
from cluster.cli import data, image, k8s, requirements
from cluster.cli.command_line import JSON_HELP, in_checkout, request, shell, show, told
from cluster.control import chaos as injection
from cluster.control import ending, scaling, view
from cluster.control import storm as storming
from cluster.control import trace as tracing
from cluster.control import watch as watching
from cluster.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREREQUISITE, RunFailed, UsageError
from cluster.launch import configuration, planning, saved, startup, teardown
from cluster.runtime import tensorboard as board
from cluster.system import interrupts

TASK_HELP = "task such as chief or worker-0 (default: every task)"
RUN_HELP = "run folder's name (default: the current run)"
TRUST_HELP = "take a run that this user did not start here, or that was changed since (default: no)"


UP_HELP = {
    "workers": "worker tasks beside the chief; 0: the chief alone (default: 2; 0 for a strategy of one process)",
    "ps": "parameter servers; 1 or more: ParameterServerStrategy (default: 0)",
    "evaluator": "add a task that evaluates every new checkpoint (default: no)",
    "preset": "fashion_mnist, mnist, resnet50_synthetic or package.module:function (default: fashion_mnist)",
    "loop": "custom, or fit for Keras's own (default: custom)",
    "script": "run this script, which reads TF_CONFIG, in every task; its arguments follow -- (default: our trainer)",
    "separate-chief": "give the script's TF_CONFIG a chief, as with --ps (default: no, it is worker 0)",
    "requirements": "requirements file with packages for your own code (default: none)",
    "env": "variable for every task: NAME, with its value here, or NAME=VALUE; may be repeated (default: none)",
    "strategy": "auto, one, mirrored, central, multiworker, ps or tpu (default: auto, from the topology)",
    "devices": "replicas in each training task, on logical CPUs; with --gpus as many as its GPUs (default: 1)",
    "runtime": "auto, docker or local (default: auto: containers where a Docker Engine answers)",
    "gpus": "none, all, how many, or ids such as 0,1: for the chief and the workers (default: none, they see none)",
    "gpus-per-task": "GPUs of each of these tasks (default: --gpus shared out evenly)",
    "gpu-runtime": "how containers get them: reserve, cdi, or the older nvidia (default: reserve)",
    "nccl-debug": "what NCCL tells in the logs: VERSION, WARN, INFO or TRACE (default: WARN)",
    "memory": "what each container may use, such as 8GiB; at that it is killed (default: its share of the machine's)",
    "network": "local tasks' network: private, or host, the machine's (default: private; host for scripts and TPUs)",
    "bitwise-elastic": "virtual shards V: any number of replicas up to V gives the same bits (default: 0, none)",
    "precision": "fp32, bf16 or fp16: what layers compute in; weights stay in float32 (default: fp32)",
    "checkpoint-every": "optimizer steps such as 200, or seconds such as 30s, between two checkpoints (default: auto)",
    "hang-timeout": "seconds without a new step after which every task starts again (default: 60)",
    "max-restarts": "restarts of a program that fails by itself and makes no progress (default: 3)",
    "name": "name of the run (default: preset, date and time)",
    "resume": "go on with this run, on its own topology unless another is given (default: start a new run)",
    "trust": TRUST_HELP,
    "fresh": "start a run of this --name again, its old folder is deleted (default: no)",
    "tensorboard-port": "port of TensorBoard on 127.0.0.1; 0: none (default: 6006)",
    "detach": "return once every task is training (default: stay until the end)",
    "dry": "only print the commands (default: no)",
    "json": JSON_HELP,
}


@task(auto_shortflags=False, iterable=["env"], help={name: text for name, text in UP_HELP.items() if name != "json"})
@told
def up(
    c, workers="", ps="", evaluator=False, preset="", loop="", script="", separate_chief=False, requirements="",
    env=None, strategy="", devices="", runtime="auto", gpus="", gpus_per_task="", gpu_runtime="", nccl_debug="",
    network="", memory="", bitwise_elastic="", precision="", checkpoint_every="", hang_timeout="",
    max_restarts="", name="", resume="", trust=False, fresh=False, tensorboard_port=str(board.PORT), detach=False,
    dry=False,
):  # fmt: skip
    """Bring up a cluster and train; overrides follow --, such as: invoke up -- --epochs 1."""
    began = time.time()
    asked = request(c, locals())
    if asked.asks_for_help:
        print(configuration.options(asked))
        return
    if dry or c.config.run.dry:
        planned = planning.plan(asked, installs=False)
        startup.announce(planned)
        print("\n".join(startup.commands(planned)))
        return
    with interrupts.handled():
        sh = shell(c)
        planned = startup.begin(asked, sh, began=began, tell=startup.announce)
        raise Exit(code=watching.attend(planned.run, planned.runtime, planned.tensorboard_port, detach, sh))


@task(
    auto_shortflags=False,
    iterable=["env"],
    help={name: text for name, text in UP_HELP.items() if name not in ("detach", "dry")},
)
@told
def plan(
    c, workers="", ps="", evaluator=False, preset="", loop="", script="", separate_chief=False, requirements="",
    env=None, strategy="", devices="", runtime="auto", gpus="", gpus_per_task="", gpu_runtime="", nccl_debug="",
    network="", memory="", bitwise_elastic="", precision="", checkpoint_every="", hang_timeout="",
    max_restarts="", name="", resume="", trust=False, fresh=False, tensorboard_port=str(board.PORT), json=False,
):  # fmt: skip
    """Show what `up` would start with the same options, and start nothing."""
    asked = request(c, locals())
    if asked.asks_for_help:
        print(configuration.options(asked))
        return
    show(planning.plan(asked, installs=False).to_json(), view.plan, as_json=json)


@task(
    auto_shortflags=False,
    help={"run": RUN_HELP, "watch": "redraw until the run ends (default: no)", "json": JSON_HELP},
)
@told
def status(c, run="", watch=False, json=False):
    """Show every task's state, step, speed, loss and restarts."""
    folder = planning.find_run(run)
    if watch:
        live = view.Live()
        watching.follow(folder, live.show)
        live.clear()
    show(view.status(folder), view.table, as_json=json)


@task(
    auto_shortflags=False,
    positional=["task"],
    optional=["task"],
    help={"task": TASK_HELP, "run": RUN_HELP, "follow": "go on until the run ends (default: no)"},
)
@told
def logs(c, task=None, run="", follow=False):
    """Show what the tasks' programs printed."""
    folder = planning.find_run(run)
    cluster = folder.load_cluster()
    view.logs(folder, [cluster.task(task).name] if task else [member.name for member in cluster.tasks], follow)


@task(
    auto_shortflags=False,
    positional=["task"],
    optional=["task"],
    help={
        "task": "task that trains, such as worker-0 (default: none, it must be named)",
        "steps": "optimizer steps that the trace holds at least (default: 5)",
        "run": RUN_HELP,
    },
)
@told
def profile(c, task=None, steps="5", run=""):
    """Trace some steps of a task while it trains, to be read in TensorBoard's Profile tab."""
    if not task:
        raise UsageError("the task is missing: name one that trains, such as invoke profile worker-0")
    print("\n".join(tracing.trace(planning.find_run(run), task, spec.parse_count("steps", steps, 1, 10_000))))


@task(
    auto_shortflags=False,
    positional=["run"],
    optional=["run"],
    help={"run": RUN_HELP, "timeout": "seconds to wait (default: as long as it takes)"},
)
@told
def wait(c, run=None, timeout=""):
    """Wait for a run to end and tell how; exit code 0 done, 1 failed, 4 timed out, 130 stopped."""
    folder = planning.find_run(run)
    bound = spec.parse_count("timeout", timeout, 1, 10**9) if timeout else float("inf")
    ended = watching.follow(folder, lambda value: None, bound)
    print("\n".join(view.ended(folder, planning.shown(folder.path))))
    raise Exit(code=watching.exit_code(ended))


@task(auto_shortflags=False, positional=["run"], optional=["run"], help={"run": RUN_HELP})
@told
def stop(c, run=None):
    """Save a checkpoint at the same step on every task and stop; go on with `up --resume`."""
    folder = planning.find_run(run)
    watching.stop(folder, "invoke stop")
    left = teardown.finish(folder, shell(c))
    print("\n".join(view.ended(folder, planning.shown(folder.path))), flush=True)
    if left:
        raise RunFailed(left)


@task(
    auto_shortflags=False,
    help={
        "workers": "worker tasks beside the chief; 0: the chief alone (default: as many as now)",
        "ps": "parameter servers (default: as many as now)",
        "run": RUN_HELP,
        "trust": TRUST_HELP,
    },
)
@told
def scale(c, workers="", ps="", run="", trust=False):
    """Go on with more or fewer workers: save at the same step on every task, and train on from there at once."""
    raise Exit(code=scaling.scale(planning.find_run(run), workers, ps, shell(c), trust=trust))


@task(
    auto_shortflags=False,
    positional=["run"],
    optional=["run"],
    help={
        "run": "run to take down (default: every run of this checkout, and TensorBoard)",
        "timeout": "seconds in which a run may save and stop before it is ended (default: 15)",
    },
)
@told
def down(c, run=None, timeout="15"):
    """End every process, container and network that `up` started. Run folders stay."""
    bound = spec.parse_count("timeout", timeout, 0, 10**9)
    raise Exit(code=ending.down(planning.runs_dir(), run, bound, shell(c)))


SAVED_HELP = {"run": RUN_HELP, "trust": TRUST_HELP}


@task(auto_shortflags=False, positional=["run"], optional=["run"], help={**SAVED_HELP, "json": JSON_HELP})
@told
def evaluate(c, run=None, trust=False, json=False):
    """Evaluate a run's newest checkpoint on the whole test split, in one process without a strategy."""
    shell(c, quiet=True)(saved.command("evaluate", planning.find_run(run), *(["--json"] if json else []), trust=trust))


@task(auto_shortflags=False, positional=["run"], optional=["run"], help=SAVED_HELP)
@told
def export(c, run=None, trust=False):
    """Write a run's newest checkpoint as a SavedModel to its folder export/."""
    shell(c, quiet=True)(saved.command("export", planning.find_run(run), trust=trust))


@task(
    auto_shortflags=False,
    positional=["run"],
    optional=["run"],
    help={**SAVED_HELP, "image": "image file, resized to what the model takes (default: none, it must be named)"},
)
@told
def predict(c, run=None, image="", trust=False):
    """Say what a run's exported model makes of an image."""
    if not image:
        raise UsageError("--image is missing: name an image file, such as --image boot.png")
    shell(c, quiet=True)(
        saved.command("predict", planning.find_run(run), "--image", str(Path(image).absolute()), trust=trust)
    )


@task(auto_shortflags=False, help={"port": UP_HELP["tensorboard-port"], "runtime": UP_HELP["runtime"]})
@told
def tensorboard(c, port=str(board.PORT), runtime="auto"):
    """Start TensorBoard over all runs, unless it runs, and say where."""
    number = spec.parse_count("port", port, 1, 65535)
    board.start(planning.runs_dir(), number, startup.tensorboard_runtime(runtime, shell(c)), shell(c))
    print(board.address(number))


@task(
    auto_shortflags=False,
    help={
        "bandwidth": "also measure the all-reduce between GPUs, which takes a minute (default: no)",
        "gpus": "with --bandwidth, which: all, how many, or ids such as 0,1 (default: all)",
        "json": JSON_HELP,
    },
)
@told
def doctor(c, bandwidth=False, gpus="", json=False):
    """Check what this machine has and lacks, each with its fix; exit code 3 where something must be mended."""
    value = checks.look(bandwidth=bandwidth, gpus=gpus)
    show(value, view.findings, as_json=json)
    raise Exit(code=0 if value["ok"] else EXIT_PREREQUISITE)


@task(
    auto_shortflags=False,
    help={
        "write": "renew the table in docs/strategies.md, if no row failed (default: no)",
        "json": JSON_HELP,
    },
)
@told
def verify(c, write=False, json=False):
    """Train shortly with every strategy and both loops, and compare; exit code 1 where one failed."""
    shell(c, aside=True)(startup.data_command("prepare", verification.DATASET))
    rows = verification.examine(lambda line: print(line, file=sys.stderr if json else sys.stdout, flush=True))
    show({"rows": rows}, lambda _: [], as_json=json)
    if write:
        print(f"renewed {' and '.join(verification.write(rows))}", file=sys.stderr)
    raise Exit(code=EXIT_FAILED if verification.failed(rows) else EXIT_DONE)


@task(
    auto_shortflags=False,
    help={
        "only": "names separated by commas, such as start,throughput (default: all but elastic and saving)",
        "rounds": "times that each is measured, one after the other in turn (default: 5)",
        "runtime": "auto or local; local: nothing that needs an engine (default: auto)",
        "peers": "measure PyTorch and Ray, too; see benchmarks/README.md (default: no)",
        "quick": "only try everything, with few steps, and keep nothing (default: no)",
        "write": "renew the table in docs/figures.md, too (default: no)",
        "json": JSON_HELP,
    },
)
@told
def bench(c, only="", rounds="5", runtime="auto", peers=False, quick=False, write=False, json=False):
    """Measure how fast this is against hand-written programs; exit code 1 where a goal is missed."""
    from benchmarks import command, results  # costs `up` nothing

    count = spec.parse_count("rounds", rounds, 1, 1000)
    code, found = command.main(only, count, write=write, quick=quick, peers=peers, runtime=runtime, tell=command.stderr)
    show({"figures": found}, lambda _: results.lines(found), as_json=json)
    raise Exit(code=code)


@task(
    auto_shortflags=False,
    positional=["run"],
    optional=["run"],
    help={
        "run": RUN_HELP,
        "runtime": "auto, docker or local (default: the run's own)",
        "tolerance": "largest relative difference between two losses that passes for equal (default: 0)",
        "trust": TRUST_HELP,
        "json": JSON_HELP,
    },
)
@told
def rerun(c, run=None, runtime="", tolerance="0", trust=False, json=False):
    """Make a run once more and compare every logged loss and the final weights; exit code 0 where they are the same."""
    folder = planning.find_run(run or "")
    bound, sh = repeating.parse_tolerance(tolerance), shell(c, aside=json)
    again, verdict = repeating.rerun(folder, runtime, bound, sh, trust=trust)
    show(repeating.to_json(again, verdict), lambda _: repeating.lines(again, verdict), as_json=json)
    raise Exit(code=repeating.exit_code(verdict))


CHAOS_HELP = {
    "kind": "kill, stop, pause, partition, slow, oom, diskfull, corrupt, or storm (default: none, it must be named)",
    "task": "task such as worker-1 (default: none, it must be named; a storm draws its own)",
    "at-step": "not before the run has done this many steps (default: 0, at once)",
    "whole": "kill the task's agent too, as when its machine dies (default: no, its program alone)",
    "faults": "of a storm (default: 20)",
    "seed": "of a storm: the same one draws the same faults (default: 0)",
    "kinds": "of a storm, such as kill,pause (default: all that this run can outlive)",
    "timeout": "seconds to wait for the step, and for the recovery (default: 300)",
    "run": RUN_HELP,
    "json": JSON_HELP,
}


@task(auto_shortflags=False, positional=["kind", "task"], optional=["kind", "task"], help=CHAOS_HELP)
@told
def chaos(
    c, kind=None, task=None, at_step="0", whole=False, faults="20", seed="0", kinds="", timeout="300", run="",
    json=False,
):  # fmt: skip
    """Inflict a real fault on a run and say what it cost, once the run has recovered or ended."""
    folder = planning.find_run(run)
    if kind == "storm":
        count, drawn = spec.parse_count("faults", faults, 1, 10_000), [word for word in kinds.split(",") if word]
        raise Exit(code=storming.main(folder, count, spec.parse_count("seed", seed, 0, 2**31 - 1), drawn))
    if not kind or (not task and kind in injection.KINDS):
        raise UsageError(f"chaos {kind or ''}: name a fault and a task, such as chaos kill worker-0, or chaos storm")
    fault = injection.Fault(kind, task or "chief", spec.parse_count("at-step", at_step, 0, 10**12), whole)
    injection.check(folder, fault)
    result = injection.inflict(folder, fault, spec.parse_count("timeout", timeout, 1, 10**9))
    show(dataclasses.asdict(result), lambda _: [f"{fault} at step {result.step}: {result.told}"], as_json=json)
    raise Exit(code=EXIT_DONE if result.as_it_should else EXIT_FAILED)


ABREAST = (
    *(f"tests/e2e/test_{name}.py" for name in ("image_contents", "own_models", "strategies", "scripts")),
    *(f"tests/e2e/test_{name}.py" for name in ("saved", "virtual_tasks", "golden", "checkout_paths")),
    *("tests/compose", "tests/unit"),
)
"""Tests that run two at a time, the longest first. The others measure times: they have the machine to themselves."""
TESTS = (
    [*ABREAST, "--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder"],
    ["tests", *(f"--ignore={path}" for path in ABREAST)],
)
FAST = (["tests", "--ignore=tests/e2e", "-p", "tests.fast", "-r", "fE", "--numprocesses=2", "--dist=loadfile"],)
"""Tests that start neither TensorFlow nor containers nor clusters; see `tests/fast.py`."""


@task(
    auto_shortflags=False,
    help={
        "all": "the long matrices too (default: no)",
        "fast": "only tests that start neither TensorFlow nor containers nor clusters (default: no)",
        "select": "only tests whose name matches this expression (default: every test)",
    },
)
@told
def test(c, all=False, fast=False, select=""):
    """Run the tests on this machine's CPU; container tests are skipped where no Docker Engine answers."""
    if all and fast:
        raise UsageError("--all and --fast: choose one of them")
    chosen = [*(["-m", ""] if all else []), *(["-k", select] if select else [])]
    with in_checkout(c):
        codes: list[int] = []
        for part in FAST if fast else TESTS:
            codes.append(c.run(shlex.join([sys.executable, "-m", "pytest", *chosen, *part]), warn=True).exited)
            if codes[-1] == 2:  # Ctrl-C, or tests that cannot be imported
                break
        # 5: none of a part's tests was chosen
        raise Exit(code=next((code for code in codes if code not in (0, 5)), min(codes)))


@task
@told
def golden(c):
    """Renew the golden losses in tests/golden/, after a change of numerics that is meant; `test` compares with them."""
    sh = shell(c, quiet=True)
    sh(startup.data_command("prepare", "fashion_mnist"))
    sh(shlex.join([sys.executable, "-m", "tests.golden.losses"]))


ns = Collection(
    up,
    plan,
    status,
    logs,
    profile,
    wait,
    stop,
    scale,
    down,
    evaluate,
    export,
    predict,
    tensorboard,
    doctor,
    verify,
    rerun,
    chaos,
    bench,
    test,
    golden,
)
ns.add_collection(Collection("image", image.build, image.base, image.reproduce, image.sbom))
ns.add_collection(Collection("data", data.prepare, data.shard, data.verify))
ns.add_collection(Collection("k8s", k8s.render))
ns.add_collection(Collection("requirements", requirements.lock))
