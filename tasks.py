"""The tasks: `invoke --list` shows them, `invoke --help TASK` one of them.

Here are `up`, `plan` and those that measure and test this project; the others are in `cluster/host/cli/tasks/`.
"""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

from invoke import Collection, Program, Task

from cluster.contract import spec
from cluster.host.cli.command_line import (
    COMMANDS,
    in_checkout,
    shell,
    show,
    takes_request,
    task,
)
from cluster.host.cli.tasks import checks, preparing, projects, runs, tour
from cluster.host.control import foreground
from cluster.host.launch import mirroring, planning, startup
from cluster.host.launch.plan import describe_plan, memory_lines, plan_lines
from cluster.host.options import run_file
from cluster.host.view import interrupts
from cluster.system.errors import UsageError
from cluster.system.files import ROOT
from cluster.system.messages import COMMAND, short_path


@takes_request(has_dry_run=True)
def up(c, request, dry=False):
    """Bring up a cluster and train; overrides follow --, such as: invoke up -- --epochs 1."""
    began = time.time()
    dry = dry or c.config.run.dry
    with interrupts.handled():
        if not dry:
            mirroring.fetch_run(request)
        planned = planning.plan(request)
        startup.print_plan(planned)
        if dry:
            print("\n".join(startup.list_commands(planned)))
            return None
        return foreground.up(planned, shell(c), began=began)


@takes_request()
def plan(c, request, write="", json=False):
    """Show what `up` would start with the same options, and start nothing."""
    planned = planning.plan(request)
    show(describe_plan(planned), lambda value: plan_lines(value) + memory_lines(value["memory"]), as_json=json)
    if write:
        path = run_file.write_run_file(write, request, planned.config)
        print(f"wrote {short_path(path)}: {COMMAND} up --file {write}", file=sys.stderr)


@task()
def bench(c, only="", rounds="5", runtime="auto", peers=False, quick=False, write=False, json=False):
    """Measure how fast this is against hand-written programs; exit code 1 where a goal is missed."""
    from benchmarks import command, results  # here, because `up` does without them

    count = spec.parse_count("rounds", rounds, 1, 1000)
    code, found = command.main(only, count, write=write, quick=quick, peers=peers, runtime=runtime, log=command.stderr)
    show({"figures": found}, lambda _: results.lines(found), as_json=json)
    return code


@task()
def recording(c):
    """Renew the recording in README.md: two real runs, one of which loses a task."""
    from benchmarks import command, recording  # here, because `up` does without them

    recording.record(command.stderr)


THREE_FILES_AT_A_TIME = ("--numprocesses=3", "--dist=loadfile", "--no-loadscope-reorder")
"""On two cores, too: clusters and commands often wait. The longest files come first, by their folders' names."""
TESTS = (("tests", "-m", "not long", *THREE_FILES_AT_A_TIME),)
HOURS = "--timeout=7200"
"""The seconds that a matrix or a storm may take; pyproject.toml has those of other tests."""
ALL_TESTS = (("tests", "-m", "not alone", HOURS, *THREE_FILES_AT_A_TIME), ("tests", "-m", "alone", HOURS))
FAST_TESTS = (("tests", "--ignore=tests/e2e", "-p", "tests.fast", "-r", "fE", *THREE_FILES_AT_A_TIME),)
"""Tests that start neither TensorFlow nor containers nor clusters; see `tests/fast.py`."""
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
"""Hundreds of processes import the same modules, and each worker of pytest rewrites the tests' asserts."""


@task(has_dry_run=True)
def test(c, all=False, fast=False, select=""):
    """Run the tests of the project in this folder on the CPU; container tests are skipped where no engine answers."""
    if all and fast:
        raise UsageError("--all and --fast: choose one of them")
    if not Path.cwd().is_relative_to(ROOT) or Path("test_project.py").exists():
        projects.test(select)
    with in_checkout(c):
        codes: list[int] = []
        for part in FAST_TESTS if fast else ALL_TESTS if all else TESTS:
            command = [sys.executable, "-m", "pytest", *part, *(["-k", select] if select else [])]
            codes.append(c.run(shlex.join(command), warn=True, env=COMPILED).exited)
            if codes[-1] == 2:  # Ctrl-C, or tests that cannot be imported
                break
        # 5: none of a part's tests was chosen
        return next((code for code in codes if code not in (0, 5)), min(codes))


@task(has_dry_run=True)
def golden(c):
    """Renew the golden losses in tests/golden/, after a change of numerics that is meant; `test` compares with them."""
    sh = shell(c, quiet=True)
    sh(startup.data_command("prepare", "fashion_mnist"))
    sh(shlex.join([sys.executable, "-m", "tests.golden.losses"]))


@task(has_dry_run=True)
def release(c, dry=False):
    """Check a release of the version in pyproject.toml, and make its files; only the hosted workflow publishes."""
    words = ["--dry"] if dry or c.config.run.dry else []
    with in_checkout(c):
        # With `invoke --dry`, too, the checks run.
        return c.run(shlex.join([sys.executable, ".ci/release.py", *words]), warn=True, dry=False).exited


MODULES = (projects, runs, checks, tour)
"""The modules whose every task is called by its own name; those of a collection follow its name and a dot."""

ns = Collection(
    *((bench, golden, recording, release) if (ROOT / "tests").exists() else ()),  # not in what `pip install` installs
    test,
    up,
    plan,
    *(each for module in MODULES for each in vars(module).values() if isinstance(each, Task)),
    image=Collection(preparing.build, preparing.base, preparing.reproduce),
    data=Collection(preparing.prepare, preparing.shard, preparing.examine, preparing.verify),
    k8s=Collection(preparing.render),
)
COMMANDS.update(ns.task_names)

if __name__ == "__main__":  # for the command `tf-cluster`, see cluster/launcher.py
    Program(version="0.1.0", namespace=ns, name="tf-cluster", binary="tf-cluster", binary_names=["tf-cluster"]).run()
