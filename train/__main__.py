"""The training program of one task.

    python -m train --run-dir runs/RUN                               train according to cluster.json and config.json
    python -m train --print-config [--preset P] [-- --epochs 1 ...]  check a configuration and print it as JSON

A task waits at the gate until its cluster is complete. Parameter servers and their workers then run a server, the
evaluator evaluates, and all other tasks build the same strategy, model and data, restore the newest checkpoint and
train from its step. `train/program.py` implements this; the present file runs before TensorFlow is imported.
"""

import argparse
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.contract import user_code
from cluster.contract.recovery import standby_cluster
from cluster.contract.run import membership
from cluster.contract.run.folder import RunFolder
from cluster.system import terminal
from cluster.system.errors import EXIT_BUG, EXIT_CANCELLED, EXIT_PEER_LOST, ClusterError, RunFailed
from cluster.system.json_files import read_json
from cluster.system.messages import COMMAND, described, plain
from train.config import TrainConfig
from train.data import dataset_record
from train.settings import overrides
from train.startup import preload


def main(arguments: list[str]) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m train", description="The training program of one task.")
    parser.add_argument("--run-dir", type=Path, help="run folder to train in")
    parser.add_argument("--print-config", action="store_true", help="only check the configuration and print it")
    parser.add_argument("--preset", default="fashion_mnist", help="complete configuration to start from (%(default)s)")
    parser.add_argument("--data-dir", type=Path, default="data", help="folder of prepared data (%(default)s)")
    parser.add_argument("--base", type=Path, help="config.json to start from instead of a preset")
    parser.add_argument("--cores", type=int, default=0, help="cores of each task; 0: of this machine (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="-- OVERRIDE", help="such as --epochs 1, see --help after --")
    options = parser.parse_args(arguments)
    try:
        if options.print_config:
            if user_code.RESULT_FILE in os.environ:
                return user_code.reply(lambda: _resolved(options))
            resolved = _resolved(options)
            print(resolved if isinstance(resolved, str) else json.dumps(resolved))
            return 0
        if not options.run_dir or not (options.run_dir / "cluster.json").exists():
            parser.error(f"--run-dir must name a run folder; `{COMMAND} up` makes one and starts every task of it")
        return train(RunFolder(options.run_dir))
    except ClusterError as error:
        print(f"error: {plain(str(error))}", file=sys.stderr)
        return error.exit_code


def _resolved(options: argparse.Namespace) -> dict[str, Any] | str:
    base = TrainConfig.from_json(read_json(options.base)) if options.base else None
    try:
        resolved = overrides.resolve_config(options.preset, options.overrides, base, options.cores)
    except overrides.Help as help_:
        return str(help_)
    return {
        "config": resolved.to_json(),
        "code_dirs": [str(folder) for folder in resolved.code_dirs()],
        "data": dataset_record.describe_ready(options.data_dir, resolved.dataset, resolved.source),
    }


def train(run: RunFolder) -> int:
    """Run this task's part of the run; return the exit code, from which the agent decides what to do next."""
    if os.environ.get("TASK") == "evaluator":  # if the run ends during the imports, its last checkpoint counts
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Imports TensorFlow, unless this process was forked from one that has.
    preload.load(run.load_config(), run.load_cluster().strategy)
    from train import program

    standby = _stand_by(run) if standby_cluster.VARIABLE in os.environ else None
    if not standby:
        if "STANDBY_PROCESS" in os.environ:
            program.rehearse(run)
        wait_at_gate()
    faulthandler.enable()  # shows the stack of a crash in native code
    faulthandler.register(signal.SIGUSR1)  # the agent requests the stacks of all threads when the gang hangs
    cluster = membership.cluster(run, int(os.environ.get("GENERATION", "0")))
    task = cluster.task(os.environ.get("TASK", "chief"))
    try:
        if standby:
            standby()
        else:
            program.Program(run, task).main()
    except ClusterError:
        raise
    except SystemExit as error:  # otherwise the agent would interpret its exit code
        traceback.print_exc()
        raise RunFailed(f"your code ended the training: {described(error)}") from error
    except Exception as error:
        if task in cluster.members and isinstance(error, program.PEER_LOST):
            if program.is_cancelled(error):
                traceback.print_exc()
                print(f"error: {program.CANCELLED}", file=sys.stderr)
                return EXIT_CANCELLED
            print(f"error: lost contact with the cluster: {program.describe_lost_contact(error)}", file=sys.stderr)
            return EXIT_PEER_LOST
        traceback.print_exc()
        if (known := program.explain(error)) is not None:
            raise known from error
        return EXIT_BUG
    return 0


def _stand_by(run: RunFolder) -> Callable[[], None]:
    """Form the standby processes' cluster, prepare to train in it, wait at the gate, and return the training function.

    Output until then is discarded: messages such as the loss of this cluster do not belong in the log.
    """
    from train.program import Program

    os.environ["TF_CONFIG"] = os.environ[standby_cluster.VARIABLE]
    if not os.environ["TF_CONFIG"]:  # a cluster of one task
        del os.environ["TF_CONFIG"]
    with terminal.silence():
        program = Program(run, run.load_cluster().task(os.environ.get("TASK", "chief")))
        program.stand_by()
        wait_at_gate()
    return program.main


def wait_at_gate() -> None:
    """Wait until the agent reports a complete cluster and sends its variables. Without an agent, do not wait."""
    if "GATE_FD" in os.environ:
        with os.fdopen(int(os.environ["GATE_FD"]), "rb") as gate:
            if not (line := gate.readline()):
                sys.exit(EXIT_PEER_LOST)  # the agent has ended, or ends this generation
            os.environ.update(json.loads(line))
            if not os.environ.get("TF_CONFIG"):  # for a chief that continues alone
                os.environ.pop("TF_CONFIG", None)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip TensorFlow's teardown, which can hang or abort when other tasks end at the same time.
    os._exit(code)
