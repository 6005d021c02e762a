"""Prepare or verify a dataset: `python -m train.data prepare|verify [--name NAME] [--data-dir DIR] [--fresh]`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cluster.errors import EXIT_DONE, EXIT_INTERRUPTED, ClusterError, UsageError
from train.data import arrays
from train.data.prepare import prepare, say


class _Parser(argparse.ArgumentParser):
    """Tells wrong usage like every other error here: one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says and return the exit code."""
    # Read when TensorFlow is imported: no start-up messages, and no GPU taken from whoever is training on it.
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    try:
        arguments = _parser().parse_args(argv)
        if arguments.command == "verify":
            arrays.verify(arrays.find(arguments.data_dir, arguments.name), say)
        else:
            array_set = prepare(arguments.name, arguments.data_dir, arguments.fresh)
            say(
                f"{array_set.name} {array_set.version}: {array_set.train.num_examples} examples to train, "
                f"{array_set.test.num_examples} to test, {array_set.num_classes} classes"
            )
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; nothing half prepared is left", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m train.data", description="Prepare or verify the data to train on.")
    commands = parser.add_subparsers(dest="command", required=True)
    prepare_command = commands.add_parser("prepare", help="prepare a dataset once, from the first source that has it")
    prepare_command.add_argument("--fresh", action="store_true", help="decode again what is prepared already")
    verify_command = commands.add_parser("verify", help="recompute the sha256 of every prepared file")
    for command in (prepare_command, verify_command):
        command.add_argument("--name", default="fashion_mnist", help="default: %(default)s")
        command.add_argument("--data-dir", type=Path, default=Path("data"), help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
