"""The tasks that prepare runs: the images, the datasets, and the manifests of a run for Kubernetes."""

import sys

from cluster.host import kubernetes
from cluster.host.cli.command_line import shell, show, takes_request, task
from cluster.host.image import images
from cluster.host.launch import startup
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, UsageError
from cluster.system.messages import COMMAND
from cluster.system.terminal import error_text


@task(has_dry_run=True)
def build(c, accelerator="cpu", base=""):
    """Build the training image and the TensorBoard image."""
    images.train_image(accelerator)  # refuses a typo before any engine or registry is asked for the base
    for command in images.build_commands(accelerator, images.default_base(base)):
        shell(c)(command)


@task(has_dry_run=True)
def base(c):
    """Make a Debian base image, for machines that cannot pull one."""
    for command in images.base_commands():
        shell(c)(command)


@task()
def reproduce(c, accelerator="cpu", image="train", against="", json=False):
    """Build an image from nothing, twice, and compare every layer; exit code 0 where they are identical."""
    sh = shell(c, aside=json)
    chosen = images.choose_images(image, against)
    verdicts = [images.reproduce_image(each, accelerator, against, sh) for each in chosen]
    value = [verdict.to_json() for verdict in verdicts]
    show(value, lambda _: [line for verdict in verdicts for line in verdict.lines()], as_json=json)
    return EXIT_DONE if all(verdict.identical for verdict in verdicts) else EXIT_FAILED


@task(has_dry_run=True)
def shard(c, name="fashion_mnist", shards="", size="", fresh=False):
    """Write a dataset as TFRecord shards, to be streamed: invoke up -- --source stream."""
    words = [*(["--shards", shards] if shards else []), *(["--size", size] if size else [])]
    shell(c)(startup.data_command("shard", name, *words, *(["--fresh"] if fresh else [])))


@task(has_dry_run=True)
def prepare(c, name="fashion_mnist", fresh=False):
    """Get a dataset: as prepared before, else from TFDS, else from Debian's package."""
    shell(c)(startup.data_command("prepare", name, *(["--fresh"] if fresh else [])))


@task(has_dry_run=True)
def examine(c, name="", num_outputs="", fresh=False):
    """Call a dataset function and check what it returns, as `up -- --source function` does."""
    if not name:
        raise UsageError(f"the function is missing: `{COMMAND} data.examine --name mine:data`")
    words = ["--num-outputs", num_outputs] if num_outputs else []
    shell(c)(startup.data_command("examine", name, *words, *(["--fresh"] if fresh else [])))


@task(has_dry_run=True)
def verify(c, name="fashion_mnist"):
    """Check every prepared file of a dataset against its recorded sha256."""
    shell(c)(startup.data_command("verify", name))


@takes_request(*kubernetes.NOT_RENDERED, claim=kubernetes.CLAIM, cpus=kubernetes.CPUS)
def render(c, request, kind="jobset", image="", claim=kubernetes.CLAIM, cpus=kubernetes.CPUS, data=False):
    """Print a run as manifests for Kubernetes; overrides follow --, such as: invoke k8s.render -- --epochs 1."""
    documents = kubernetes.render(request, kind, image, claim, cpus, data=data)
    print(error_text(kubernetes.WARNING), file=sys.stderr)
    print(kubernetes.to_yaml(documents), end="")
