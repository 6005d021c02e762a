"""The tasks `data.*`: the datasets, got and checked."""

from __future__ import annotations

from cluster.host.cli.command_line import has_dry_run, shell, task
from cluster.host.launch import startup

NAME_HELP = "fashion_mnist or mnist (default: fashion_mnist)"


@task(
    name="any TFDS dataset, or package.module:function (default: fashion_mnist)",
    shards="files of each split (default: as many as there are already, or 8)",
    size="resize images to this height and width in pixels (default: as they are)",
    fresh="write them again (default: no)",
)
@has_dry_run
def shard(c, name="fashion_mnist", shards="", size="", fresh=False):
    """Write a dataset as TFRecord shards, to be streamed: invoke up -- --source stream."""
    words = [*(["--shards", shards] if shards else []), *(["--size", size] if size else [])]
    shell(c)(startup.data_command("shard", name, *words, *(["--fresh"] if fresh else [])))


@task(name=NAME_HELP, fresh="prepare it again, even if it is (default: no)")
@has_dry_run
def prepare(c, name="fashion_mnist", fresh=False):
    """Get a dataset: as prepared before, else from TFDS, else from Debian's package."""
    shell(c)(startup.data_command("prepare", name, *(["--fresh"] if fresh else [])))


@task(
    name="package.module:function, of (split, shard) (default: none)",
    num_outputs="classes of whole-number labels, such as 10 (default: none are)",
    fresh="count the examples again where the datasets do not know how many they have (default: no)",
)
@has_dry_run
def examine(c, name="", num_outputs="", fresh=False):
    """Call a dataset function and check what it returns, as `up -- --source function` does."""
    words = ["--num-outputs", num_outputs] if num_outputs else []
    shell(c)(startup.data_command("examine", name, *words, *(["--fresh"] if fresh else [])))


@task(name=NAME_HELP)
@has_dry_run
def verify(c, name="fashion_mnist"):
    """Check every prepared file of a dataset against its recorded sha256."""
    shell(c)(startup.data_command("verify", name))
