"""The task `explain`: what a TF_CONFIG says, and what is wrong with it."""

from __future__ import annotations

import os

from invoke import Exit

from cluster import spec
from cluster.checks import explain as explaining
from cluster.cli.command_line import JSON_HELP, show, task
from cluster.errors import EXIT_DONE, EXIT_FAILED, UsageError
from cluster.launch import folders
from cluster.options.request import OPTIONS, Request
from cluster.options.topology import topology as topology_of


@task(
    "run",
    run="run whose cluster is explained (default: TF_CONFIG of the environment, else the current run)",
    task="of a run or of the options of up: the task whose TF_CONFIG is looked at (default: the whole cluster)",
    file="file with anybody's TF_CONFIG, or - for standard input (default: none)",
    workers=OPTIONS["workers"].full_help,
    ps=OPTIONS["ps"].full_help,
    evaluator=OPTIONS["evaluator"].full_help,
    devices=OPTIONS["devices"].full_help,
    strategy=f"{OPTIONS['strategy'].help}; beside --file, what trains on it (default: the topology's)",
    lint="only what is wrong with it (default: no)",
    reach="also try every address from here, while the cluster runs (default: no)",
    json=JSON_HELP,
)
def explain(
    c, run=None, task="", file="", workers="", ps="", evaluator=False, devices="", strategy="", lint=False, reach=False,
    json=False,
):  # fmt: skip
    """Draw a cluster in words and find the mistakes of its TF_CONFIG, ours or anybody's; exit code 1 for mistakes."""
    topology = bool(workers or ps or evaluator or devices)
    named = [words for words, given in ((f"run {run}", run), ("--file", file), ("options of up", topology)) if given]
    if len(named) > 1:
        raise UsageError(f"explain {' and '.join(named)}: explain one of them at a time")
    variable = os.environ.get("TF_CONFIG")
    if file or (variable is not None and not named):
        text, source = (explaining.read_file(file), file) if file else (variable or "", "TF_CONFIG")
        explained = explaining.of_text(text, source, strategy, reach=reach)
    elif topology or (strategy and not run):
        request = Request(workers=workers, ps=ps, evaluator=evaluator, devices=devices, strategy=strategy)
        cluster = spec.build(**topology_of(request))
        explained = explaining.of_cluster(cluster, "these options of up", task, reach=reach)
    else:
        folder = folders.find_run(run or "")
        explained = explaining.of_cluster(folder.load_cluster(), f"run {folder.name}", task, reach=reach)
    show(explained.to_json(), lambda _: explained.lines(lint=lint), as_json=json)
    raise Exit(code=EXIT_DONE if explained.ok else EXIT_FAILED)
