"""The tasks that prepare runs: the images, the datasets, and the manifests of a run for Kubernetes."""

import sys

from cluster.host import kubernetes
from cluster.host.cli.command_line import shell, show, takes_request, task
from cluster.host.image import images, reproduction
from cluster.host.launch import startup
from cluster.system.errors import EXIT_DONE, EXIT_FAILED
from cluster.system.terminal import error_text

ACCELERATOR_HELP = "cpu or gpu (default: cpu)"


@task(has_dry_run=True, accelerator=ACCELERATOR_HELP, base="image to build on (default: the pinned python image)")
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


@task(
    accelerator=ACCELERATOR_HELP,
    image="train, tensorboard or both (default: train)",
    against="compare one build with this image, by name or id (default: with a second build)",
)
def reproduce(c, accelerator="cpu", image="train", against="", json=False):
    """Build an image from nothing, twice, and compare every layer; exit code 0 where they are identical."""
    sh = shell(c, aside=json)
    verdicts = [
        reproduction.reproduce_image(each, accelerator, against, sh)
        for each in reproduction.choose_images(image, against)
    ]
    value = [verdict.to_json() for verdict in verdicts]
    show(value, lambda _: [line for verdict in verdicts for line in verdict.lines()], as_json=json)
    return EXIT_DONE if all(verdict.identical for verdict in verdicts) else EXIT_FAILED


NAME_HELP = "fashion_mnist or mnist (default: fashion_mnist)"


@task(
    has_dry_run=True,
    name="any TFDS dataset, or package.module:function (default: fashion_mnist)",
    shards="files of each split (default: as many as there are already, or 8)",
    size="resize images to this height and width in pixels (default: as they are)",
    fresh="write them again (default: no)",
)
def shard(c, name="fashion_mnist", shards="", size="", fresh=False):
    """Write a dataset as TFRecord shards, to be streamed: invoke up -- --source stream."""
    words = [*(["--shards", shards] if shards else []), *(["--size", size] if size else [])]
    shell(c)(startup.data_command("shard", name, *words, *(["--fresh"] if fresh else [])))


@task(has_dry_run=True, name=NAME_HELP, fresh="prepare it again, even if it is (default: no)")
def prepare(c, name="fashion_mnist", fresh=False):
    """Get a dataset: as prepared before, else from TFDS, else from Debian's package."""
    shell(c)(startup.data_command("prepare", name, *(["--fresh"] if fresh else [])))


@task(
    has_dry_run=True,
    name="package.module:function, of (split, shard) (default: none)",
    num_outputs="classes of whole-number labels, such as 10 (default: none are)",
    fresh="count the examples again where the datasets do not know how many they have (default: no)",
)
def examine(c, name="", num_outputs="", fresh=False):
    """Call a dataset function and check what it returns, as `up -- --source function` does."""
    words = ["--num-outputs", num_outputs] if num_outputs else []
    shell(c)(startup.data_command("examine", name, *words, *(["--fresh"] if fresh else [])))


@task(has_dry_run=True, name=NAME_HELP)
def verify(c, name="fashion_mnist"):
    """Check every prepared file of a dataset against its recorded sha256."""
    shell(c)(startup.data_command("verify", name))


@takes_request(
    *kubernetes.NOT_RENDERED,
    kind="jobset, or tfjob for Kubeflow's training operator (default: jobset)",
    image="image of the tasks, as the cluster's nodes pull it (default: tf-cluster/train:cpu or :gpu)",
    claim=f"persistent volume claim with runs and data (default: {kubernetes.CLAIM})",
    cpus=f"processors that each task requests (default: {kubernetes.CPUS})",
    data="print the job that prepares the data on that claim instead, to be applied once (default: no)",
)
def render(c, request, kind="jobset", image="", claim=kubernetes.CLAIM, cpus=kubernetes.CPUS, data=False):
    """Print a run as manifests for Kubernetes; overrides follow --, such as: invoke k8s.render -- --epochs 1."""
    documents = kubernetes.render(request, kind, image, claim, cpus, data=data)
    print(error_text(kubernetes.WARNING), file=sys.stderr)
    print(kubernetes.to_yaml(documents), end="")
