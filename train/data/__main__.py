"""Prepare, shard, examine or verify a dataset.

python -m train.data prepare|shard|examine|verify [--name NAME] [--data-dir DIR]
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from cluster.contract import user_code
from cluster.system import terminal
from cluster.system.errors import EXIT_DONE, EXIT_INTERRUPTED, ClusterError, PrerequisiteError, UsageError
from cluster.system.messages import plain
from cluster.system.terminal import print_lines
from train.data import store
from train.data.dataset_record import ArrayRecord, DatasetRecord, ShardRecord, is_user_dataset
from train.data.prepare.preparation import prepare_dataset
from train.settings import references


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports usage errors in one line, like all other errors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    # Read when TensorFlow is imported: no start-up messages, and no GPU memory taken from a training.
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    os.umask(0o022)  # containers read root's files as another user
    try:
        arguments = _parser().parse_args(argv)
        calls_function = arguments.command == "prepare" and is_user_dataset(arguments.name)
        if arguments.command == "verify":
            _verify(arguments.name, arguments.data_dir)
        elif calls_function or arguments.command == "examine":
            return _in_another_process(argv, arguments)
        else:
            store.say(_write(arguments, [])["text"])
    except ClusterError as error:
        print_lines(f"error: {plain(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; no partial data is left", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DONE


def _write(arguments: argparse.Namespace, written: list[Path]) -> dict[str, Any]:
    """Prepare, shard or examine a dataset, add its files to `written`, and return its description."""
    name, data_dir, fresh, began = arguments.name, arguments.data_dir.absolute(), arguments.fresh, time.monotonic()
    record: DatasetRecord
    if arguments.command == "prepare":
        if is_user_dataset(name):
            references.check_reference("--name", name, ())
        record = prepare_dataset(name, data_dir, fresh)
    else:
        with terminal.quiet_imports():  # they import TensorFlow
            from train.data.function.examine import examine_function
            from train.data.prepare.sharding import write_shards
        if arguments.command == "shard":
            record = write_shards(name, data_dir, num_shards=arguments.shards, size=arguments.size, fresh=fresh)
        else:
            data_dir = data_dir.resolve()
            record = examine_function(name, data_dir, arguments.num_outputs, seed=arguments.seed, fresh=fresh)
    pointer = store.pointer_of(data_dir, record.kind, name)
    written += [pointer, record.path(data_dir, name, record.version), *(file.path for file in record.files)]
    return {"text": str(record), "version": record.version, "seconds": time.monotonic() - began}


def _in_another_process(argv: Sequence[str] | None, arguments: argparse.Namespace) -> int:
    if user_code.RESULT_FILE in os.environ:
        written: list[Path] = []
        return user_code.reply(lambda: _write(arguments, written), written)
    command, subject = [sys.executable, "-m", "train.data", *(argv or sys.argv[1:])], f"dataset {arguments.name}"
    store.say(user_code.run(command, subject, "DATA_TIMEOUT_S", cwd=Path.cwd(), environment=os.environ)["text"])
    return EXIT_DONE


def _verify(name: str, data_dir: Path) -> None:
    missing = []
    for kind in (ArrayRecord, ShardRecord):
        try:
            kind.find(data_dir, name).verify(data_dir)
        except (PrerequisiteError, UsageError) as error:  # a dataset may have only shards
            missing.append(error)
    if len(missing) == 2:
        raise missing[0]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m train.data", description="Prepare, shard or verify the data to train on.")
    commands = parser.add_subparsers(dest="command", required=True)
    prepare_command = commands.add_parser("prepare", help="prepare a dataset once, from the first source that has it")
    prepare_command.add_argument("--fresh", action="store_true", help="decode again even if it is prepared")
    verify_command = commands.add_parser("verify", help="recompute the sha256 of every prepared file")
    shard_command = commands.add_parser("shard", help="write the TFRecord shards of any dataset of TFDS")
    shard_command.add_argument("--shards", type=int, help="files of each split; default: the existing number, or 8")
    shard_command.add_argument("--size", type=int, metavar="PIXELS", help="resize images to PIXELS x PIXELS")
    shard_command.add_argument("--fresh", action="store_true", help="write again even if they exist")
    examine_command = commands.add_parser("examine", help="call a dataset function of (split, shard), and check it")
    examine_command.add_argument("--num-outputs", default="", help="classes of whole-number labels, such as 10")
    examine_command.add_argument("--seed", type=int, default=0, help="seed of the run; default: %(default)s")
    examine_command.add_argument("--fresh", action="store_true", help="count the examples again")
    for command in (prepare_command, verify_command, shard_command, examine_command):
        command.add_argument(
            "--name",
            default="fashion_mnist",
            help="a dataset of TFDS, or package.module:function; default: %(default)s",
        )
        command.add_argument("--data-dir", type=Path, default=Path("data"), help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
