"""The task `k8s.render`: a run as manifests for Kubernetes."""

from __future__ import annotations

from pathlib import Path

from invoke import task
from invoke.util import yaml  # invoke brings PyYAML along, for its own files

from cluster.cli.command_line import request, told
from cluster.errors import UsageError
from cluster.launch import configuration, manifests, planning

RENDER_HELP = {
    "workers": "worker tasks beside the chief; 0: the chief alone (default: 2)",
    "ps": "parameter servers; 1 or more: ParameterServerStrategy (default: 0)",
    "evaluator": "add a task that evaluates every new checkpoint (default: no)",
    "preset": "fashion_mnist, mnist, resnet50_synthetic or package.module:function (default: fashion_mnist)",
    "loop": "custom, or fit for Keras's own (default: custom)",
    "strategy": "auto, one, mirrored, central, multiworker or ps (default: auto, from the topology)",
    "devices": "replicas in each training task, on logical CPUs (default: 1)",
    "gpus-per-task": "GPUs of the chief and of each worker (default: 0)",
    "nccl-debug": "what NCCL writes to the logs: VERSION, WARN, INFO or TRACE (default: WARN)",
    "memory": f"what each task may use (default: {manifests.MEMORY})",
    "cpus": f"processors that each task requests (default: {manifests.CPUS})",
    "bitwise-elastic": "virtual shards V: any number of replicas up to V gives the same bits (default: 0, none)",
    "precision": "fp32, bf16 or fp16: what layers compute in; weights stay in float32 (default: fp32)",
    "checkpoint-every": "optimizer steps such as 200, or seconds such as 30s, between two checkpoints (default: auto)",
    "hang-timeout": "seconds without a new step after which every task starts again (default: 60)",
    "max-restarts": "restarts of a program that fails by itself and makes no progress (default: 3)",
    "env": "variable for every task: NAME, with its value here, or NAME=VALUE; may be repeated (default: none)",
    "name": "name of the run and of every object (default: the preset's)",
    "tensorboard-port": "0: no TensorBoard (default: 6006)",
    "kind": "jobset, or tfjob for Kubeflow's training operator (default: jobset)",
    "image": "image of the tasks, as the cluster's nodes pull it (default: tf-cluster/train:cpu or :gpu)",
    "tensorboard-image": "image of TensorBoard (default: tf-cluster/tensorboard:latest)",
    "claim": f"persistent volume claim with runs and data (default: {manifests.CLAIM})",
    "storage": f"size of that claim in claim.yaml (default: {manifests.STORAGE})",
    "output": "folder to write a Kustomize base to (default: print the manifests of the run)",
}


@task(auto_shortflags=False, iterable=["env"], help=RENDER_HELP)
@told
def render(
    c, workers="", ps="", evaluator=False, preset="", loop="", strategy="", devices="", gpus_per_task="",
    nccl_debug="", memory="", cpus=manifests.CPUS, bitwise_elastic="", precision="", checkpoint_every="",
    hang_timeout="", max_restarts="", env=None, name="", tensorboard_port="6006", kind="jobset", image="",
    tensorboard_image="", claim=manifests.CLAIM, storage=manifests.STORAGE, output="",
):  # fmt: skip
    """Write a run as manifests for Kubernetes; overrides follow --, such as: invoke k8s.render -- --epochs 1."""
    requested = request(c, locals())
    if requested.asks_for_help:
        print(configuration.options(requested))
        return
    place = manifests.Place(kind, image, tensorboard_image, claim, storage, cpus)
    rendered = manifests.render(requested, place)
    if output:
        print("\n".join(_write(rendered, Path(output))))
    else:
        print("---\n".join(_text(rendered[name]) for name in rendered if name not in manifests.ONCE), end="")


def _write(rendered, folder):
    """Write a Kustomize base; return what to do with it."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output {str(folder)!r} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in (rendered | {"kustomization.yaml": [manifests.kustomization(rendered)]}).items():
        (folder / name).write_text(_text(documents))
    shown = planning.shown(folder.absolute())
    once = [f"kubectl apply -f {shown}/{name}" for name in manifests.ONCE]
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
