"""The tasks that check: this machine, the strategies, a TF_CONFIG, whether a run repeats, and whether it recovers."""

import contextlib
import dataclasses
import os
import sys

from cluster.contract import spec
from cluster.host.checks import doctor as machine
from cluster.host.checks import explain as explaining
from cluster.host.checks import rerun as repetition
from cluster.host.checks import verify as verification
from cluster.host.cli.command_line import parse_options, shell, show, task
from cluster.host.control import chaos as injection
from cluster.host.control.chaos import KINDS, STORM
from cluster.host.launch import folders, startup
from cluster.host.launch.planning import build_cluster
from cluster.host.options.request import OPTIONS, Request
from cluster.host.view import interrupts
from cluster.host.view.columns import columns
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREREQUISITE, UsageError
from cluster.system.messages import COMMAND
from cluster.system.terminal import fit, print_wait


@task()
def doctor(c, json=False):
    """Check what this machine has and lacks, each with its fix; exit code 3 where something must be fixed."""
    findings = machine.examine_machine()
    value = machine.report(findings)
    show(value, lambda _: columns(finding.row for finding in findings), as_json=json)
    return EXIT_DONE if value["ok"] else EXIT_PREREQUISITE


@task()
def verify(c, json=False):
    """Train briefly with every strategy and both loops, and compare; exit code 1 if one failed."""
    shell(c, aside=True)(startup.data_command("prepare", verification.DATASET))
    rows = verification.verify_strategies(lambda line: print(line, file=sys.stderr, flush=True))
    show({"rows": rows}, lambda _: verification.table_lines(rows), as_json=json)
    return EXIT_FAILED if verification.count_failed(rows) else EXIT_DONE


@task(runtimes=OPTIONS["runtime"].help)
def rerun(c, run=None, runtime="", trust=False, json=False):
    """Make a run once more and compare every logged loss and the final weights; exit code 0 where they are the same."""
    folder = folders.find_run(run or "")
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        again, compared = repetition.repeat_run(folder, runtime, shell(c, aside=json), trust=trust, shown=not json)
    value = {"run": again.name, **(dataclasses.asdict(compared) if compared else {"verdict": "failed"})}
    show(value, lambda _: repetition.rerun_lines(again, compared), as_json=json)
    return EXIT_DONE if compared and compared.verdict == "identical" else EXIT_FAILED


@task(faults=", ".join(KINDS), storm=STORM)
@interrupts.handled()  # so that a fault is undone after SIGTERM, too
def chaos(
    c, kind=None, task=None, at_step="0", whole=False, faults="20", seed="0", kinds="", timeout="300", minutes="60",
    run="", json=False,
):  # fmt: skip
    """Inject a real fault into a run and report its cost, once the run has recovered or ended."""
    folder, timeout_s = folders.find_run(run), spec.parse_count("timeout", timeout, 1, 10**9)
    if kind == STORM:
        count, drawn = spec.parse_count("faults", faults, 1, 10_000), [word for word in kinds.split(",") if word]
        seed = spec.parse_count("seed", seed, 0, 2**31 - 1)
        limit_s = spec.parse_count("minutes", minutes, 1, 10**5) * 60
        return injection.run_storm(folder, count, seed, drawn, timeout_s, limit_s)
    if not kind or (not task and kind in KINDS):
        raise UsageError(f"chaos {kind or ''}: name a fault and a task, such as chaos kill worker-0, or chaos storm")
    fault = injection.Fault(kind, task or "chief", spec.parse_count("at-step", at_step, 0, 10**12), whole)
    injection.check_fault(folder, fault)
    step = f"step {fault.at_step}, then for " if fault.at_step > folder.newest_step else ""
    print_wait(f"waiting for {step}the effect of {fault}")
    result = injection.inject(folder, fault, timeout_s)
    shown = f"{fault} at step {result.step}: {result.description}"
    show(dataclasses.asdict(result), lambda _: fit([shown]), as_json=json)
    return EXIT_DONE if result.is_expected else EXIT_FAILED


@task(strategies=OPTIONS["strategy"].help)
def explain(
    c, run=None, task="", file="", workers="", ps="", evaluator=False, devices="", strategy="", lint=False,
    json=False,
):  # fmt: skip
    """Draw a cluster in words and list the mistakes in any TF_CONFIG; exit code 1 for mistakes."""
    topology = bool(workers or ps or evaluator or devices)
    named = [words for words, given in ((f"run {run}", run), ("--file", file), ("options of up", topology)) if given]
    if len(named) > 1:
        raise UsageError(f"explain {' and '.join(named)}: explain one of them at a time")
    variable = os.environ.get("TF_CONFIG")
    if file or (variable is not None and not named):
        text, source = (explaining.read_tf_config(file), file) if file else (variable or "", "TF_CONFIG")
        explained = explaining.explain_text(text, source, strategy)
    elif topology or (strategy and not run):
        options = parse_options(workers=workers, ps=ps, devices=devices, evaluator=evaluator, strategy=strategy)
        explained = explaining.explain_cluster(build_cluster(Request(**options)), "the cluster of these options", task)
    else:
        if not run and not any(folders.runs_dir().glob("*/cluster.json")):
            advice = f"set it, name its --file, or give options of up: {COMMAND} explain --workers 2"
            raise UsageError(f"TF_CONFIG is not set, and there is no run; {advice}")
        folder = folders.find_run(run or "")
        explained = explaining.explain_cluster(folder.load_cluster(), f"run {folder.name}", task)
    show(explained.to_json(), lambda _: explained.lines(lint=lint), as_json=json)
    return EXIT_DONE if explained.ok else EXIT_FAILED
