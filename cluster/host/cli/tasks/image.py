"""The tasks `image.*`: the images, built, compared and listed; and `requirements.lock`, what is installed in them."""

from __future__ import annotations

import shlex

from invoke import Exit

from cluster.host.cli.command_line import JSON_HELP, RUN_HELP, TRUST_HELP, has_dry_run, shell, show, task
from cluster.host.control import replacing
from cluster.host.image import base_packages, images, locks, reproduction
from cluster.host.image import sbom as bill
from cluster.host.launch import folders
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
