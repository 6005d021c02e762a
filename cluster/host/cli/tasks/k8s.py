"""The task `k8s.render`: a run as manifests for Kubernetes."""

from __future__ import annotations

import sys
from pathlib import Path

from invoke.util import yaml  # invoke brings PyYAML along, for its own files

from cluster.host.cli.options import takes_request
from cluster.host.launch import kubernetes
from cluster.system.errors import UsageError
from cluster.system.messages import short_path
from cluster.system.terminal import error_text


@takes_request(
    *kubernetes.NOT_RENDERED,
    kind="jobset, or tfjob for Kubeflow's training operator (default: jobset)",
    image="image of the tasks, as the cluster's nodes pull it (default: tf-cluster/train:cpu or :gpu)",
    tensorboard_image="image of TensorBoard (default: tf-cluster/tensorboard:latest)",
    claim=f"persistent volume claim with runs and data (default: {kubernetes.CLAIM})",
    storage=f"size of that claim in claim.yaml (default: {kubernetes.STORAGE})",
    cpus=f"processors that each task requests (default: {kubernetes.CPUS})",
    output="folder to write a Kustomize base to (default: print the manifests of the run)",
)
def render(
    c, request, kind="jobset", image="", tensorboard_image="", claim=kubernetes.CLAIM, storage=kubernetes.STORAGE,
    cpus=kubernetes.CPUS, output="",
):  # fmt: skip
    """Write a run as manifests for Kubernetes; overrides follow --, such as: invoke k8s.render -- --epochs 1."""
    rendered = kubernetes.render(request, kubernetes.Place(kind, image, tensorboard_image, claim, storage, cpus))
    print(error_text(kubernetes.WARNING), file=sys.stderr)
    if output:
        print("\n".join(_write(rendered, Path(output))))
    else:
        print("---\n".join(_text(rendered[name]) for name in rendered if name not in kubernetes.ONCE), end="")


def _write(rendered, folder):
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output {str(folder)!r} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in (rendered | {"kustomization.yaml": [kubernetes.kustomization(rendered)]}).items():
        (folder / name).write_text(_text(documents))
    shown = short_path(folder.absolute())
    once = [f"kubectl apply -f {shown}/{name}" for name in kubernetes.ONCE]
    return [
        f"# once, and not again for another run on the same data:\n{' && '.join(once)}",
        f"kubectl apply -k {shown}",
    ]


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # it has no types
    """Writes longer text as a block, and never refers to what was written above."""

    def ignore_aliases(self, _data):
        return True

    def represent_str(self, data):
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def _text(documents):
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1_000_000)
