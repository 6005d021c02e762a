"""The tasks that prepare runs: the images, the lock files installed in them, and the datasets."""

from __future__ import annotations

import shlex

from invoke import Exit

from cluster.host.cli.command_line import JSON_HELP, RUN_HELP, TRUST_HELP, has_dry_run, shell, show, task
from cluster.host.control import replacing
from cluster.host.image import base_packages, images, locks, reproduction
from cluster.host.image import sbom as bill
from cluster.host.launch import folders, startup
from cluster.system import interrupts
from cluster.system.errors import EXIT_DONE, EXIT_FAILED
from cluster.system.messages import short_path

ACCELERATOR_HELP = "cpu or gpu (default: cpu)"


@task(accelerator=ACCELERATOR_HELP, base="image to build on (default: the pinned python image)")
@has_dry_run
def build(c, accelerator="cpu", base=""):
    """Build the training image and the TensorBoard image."""
    images.train_image(accelerator)  # refuses a typo before any engine or registry is asked for the base
    for command in images.build_commands(accelerator, images.default_base(base)):
        shell(c)(command)


@task(renew="record its packages in docker/base-packages.txt (default: no)")
def base(c, renew=False):
    """Make a Debian base image; exit code 3 where its packages are not those on record in docker/base-packages.txt."""
    for command in images.base_commands():
        shell(c)(command)
    if renew:
        base_packages.renew()
    base_packages.check()


@task(
    accelerator=ACCELERATOR_HELP,
    image="train, tensorboard or both (default: train)",
    against="compare one build with this image, by name, id or archive (default: with a second build)",
    json=JSON_HELP,
)
def reproduce(c, accelerator="cpu", image="train", against="", json=False):
    """Build an image from nothing, twice, and compare every file; exit code 0 where they are identical."""
    sh = shell(c, aside=json)
    verdicts = [reproduction.examine(each, accelerator, against, sh) for each in reproduction.chosen(image, against)]
    value = [verdict.to_json() for verdict in verdicts]
    show(value, lambda _: [line for verdict in verdicts for line in verdict.lines()], as_json=json)
    raise Exit(code=EXIT_DONE if all(verdict.identical for verdict in verdicts) else EXIT_FAILED)


@task(
    accelerator=ACCELERATOR_HELP,
    image="train or tensorboard (default: train)",
    output="file to write (default: dist/sbom-IMAGE.cdx.json)",
)
def sbom(c, accelerator="cpu", image="train", output=""):
    """List every package of an image with its version and hash as CycloneDX JSON."""
    path = bill.output(output, image, accelerator)
    print(f"{short_path(path)}: {bill.write(path, image, accelerator, shell(c))}")


@task("run", run=RUN_HELP, trust=TRUST_HELP)
def watch(c, run=None, trust=False):
    """Start a run's containers again whenever cluster/ or train/ changes, by `docker compose watch`."""
    with interrupts.handled():
        replacing.watch(folders.find_run(run), trust=trust)


@task(upgrade="take the newest versions that the requirements allow (default: no)")
@has_dry_run
def lock(c, upgrade=False):
    """Renew requirements/*.lock from requirements/*.in."""
    for command in locks.lock_commands(upgrade=upgrade):
        shell(c)(shlex.join(command))


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
