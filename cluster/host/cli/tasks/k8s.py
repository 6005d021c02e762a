"""The task `k8s.render`: a run as manifests for Kubernetes."""

import re
import sys

from invoke.util import yaml  # invoke brings PyYAML along, for its own files

from cluster.host.cli.command_line import takes_request
from cluster.host.kubernetes import rendering
from cluster.system.terminal import error_text


@takes_request(
    *rendering.NOT_RENDERED,
    kind="jobset, or tfjob for Kubeflow's training operator (default: jobset)",
    image="image of the tasks, as the cluster's nodes pull it (default: tf-cluster/train:cpu or :gpu)",
    claim=f"persistent volume claim with runs and data (default: {rendering.CLAIM})",
    cpus=f"processors that each task requests (default: {rendering.CPUS})",
    data="print the job that prepares the data on that claim instead, to be applied once (default: no)",
)
def render(c, request, kind="jobset", image="", claim=rendering.CLAIM, cpus=rendering.CPUS, data=False):
    """Print a run as manifests for Kubernetes; overrides follow --, such as: invoke k8s.render -- --epochs 1."""
    documents = rendering.render(request, kind, image, claim, cpus, data=data)
    print(error_text(rendering.WARNING), file=sys.stderr)
    print(to_yaml(documents), end="")


NUMBER = re.compile(r"[-+.0-9][-+.0-9_a-fA-FoOxX]*")
"""Text that may be a number in another version of YAML than that of PyYAML, such as 1e100."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # it has no types
    """Writes longer text as a block, and never refers to what was written above."""

    def ignore_aliases(self, _data):
        return True

    def represent_str(self, data):
        style = "|" if "\n" in data else "'" if NUMBER.fullmatch(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def to_yaml(documents):
    """Return the documents of a YAML stream."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1_000_000)
