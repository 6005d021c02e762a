"""The cluster as containers, by the commands of `commands.py` on the services that `overlay.py` describes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from cluster.contract.findings import Finding
from cluster.contract.run import owner, provenance
from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import ClusterSpec
from cluster.host.image import build, engine, images
from cluster.host.runtime import inherited, memory, network, toolkit
from cluster.host.runtime.base import Availability, Remains, Runtime, Shell, Workload
from cluster.host.runtime.compose import access, commands, overlay
from cluster.host.runtime.compose.faults import ContainerFaults
from cluster.host.runtime.compose.overlay import RUN_LABEL, Containers, project, task_user
from cluster.host.runtime.faults import FaultInjector
from cluster.host.runtime.memory import Memory
from cluster.host.runtime.network import Network
from cluster.host.runtime.payload import Payload
from cluster.system.errors import PrerequisiteError
from cluster.system.json_files import write_json
from cluster.system.paths import ROOT


def task_environment(payload: Payload, spec: ClusterSpec, *, egress: bool = False) -> dict[str, str | None]:
    """Return the variables that containers get for a payload, and what they take over from the caller."""
    seen = payload.mounted()
    return inherited.for_container(way_out=egress or payload.script is not None) | seen.environment(spec, seen.path)


class Compose(Runtime):
    """Containers of a Docker Engine, by `docker compose`."""

    name = "docker"
    tasks = "containers"
    automatic = True
    limits_memory = True
    publishes_ports = True
    python = images.PYTHON
    board = "docker"

    def probe(self) -> Availability:
        """Return whether a Docker Engine with Compose answers."""
        answer = engine.probe()
        return Availability(answer.ready, answer.detail, "" if answer.ready else engine.fix(answer.detail))

    def examine(self) -> list[Finding]:
        """Return whether an engine answers."""
        found = self.probe()
        if found.ready:
            return [Finding("docker", "ok", found.detail)]
        return [Finding("docker", "warning", found.detail, f"{found.fix}; until then runs are local")]

    def memory(self, requested: str, previous: str, num_tasks: int) -> Memory:
        """Return the limit of each container: what was requested, or its share of the engine's memory."""
        return memory.of_containers(requested or previous, num_tasks, engine.memory_bytes())

    def network(self, requested: str, previous: str, *, way_out: str, serves: bool) -> Network:
        """Return a network of the tasks' own, from which they reach a server outside where that is requested."""
        if (requested or previous) != network.EGRESS:
            return super().network(requested, previous, way_out=way_out, serves=serves)
        warning = f"warning: {network.EXPOSED}: this machine has an address in the tasks' network (--network egress)"
        return Network(network.EGRESS, network.EGRESS, warning if serves else "")

    def seen(self, payload: Payload) -> Payload:
        """Return the payload as containers have it mounted."""
        return payload.mounted()

    def render(self, work: Workload) -> dict[str, Any]:
        """Return the Compose overlay of the run."""
        payload, egress = work.payload, work.network.name == network.EGRESS
        access.check_readable(payload, task_user())
        provenance.check_hidden([work.run.path.parent, work.data_dir, *(folder for folder, _ in payload.mounts())])
        containers = Containers(
            work.run.path,
            work.data_dir,
            images.train_image(work.gpus.accelerator),
            task_user(),
            work.memory.task_bytes,
            payload.mounts(),
            task_environment(payload, work.cluster, egress=egress),
            way_out=payload.script is not None,
            egress=egress,
            gpus=work.gpus,
            debugger=work.debugger,
        )
        return {"x-runtime": self.name, **overlay.overlay(work.cluster, containers, self.seen(payload).command())}

    def preflight(self, work: Workload, ending: int = 0) -> None:  # noqa: ARG002  # the limits count, whatever is free
        """Check that the limits fit the engine's machine, and that the engine hands out GPUs."""
        work.memory.check(len(work.cluster.tasks))
        if work.gpus.ids:
            toolkit.check_engine(work.gpus.device_request)

    def prepare(self, work: Workload, sh: Shell, *, renew: bool = True) -> None:
        """Build the images."""
        build.build(sh, work.gpus.accelerator, renew=renew)

    def image(self, work: Workload) -> dict[str, Any]:
        """Return the id of the tasks' image and what it was made of."""
        return images.inspect(images.train_image(work.gpus.accelerator))

    def commands(self, work: Workload, rendered: dict[str, Any]) -> list[str]:  # noqa: ARG002  # it is in the run folder
        """Return what builds the images and starts the containers."""
        return [*build.commands(work.gpus.accelerator), commands.up(work.run.compose, work.cluster)]

    def start(self, work: Workload, sh: Shell) -> None:
        """Make the folders accessible to the tasks' user, and start the containers."""
        access.let_tasks_read(work.run.path.parent, work.data_dir)
        access.give_to_tasks(work.run.path)
        if work.payload.script:
            work.run.scratch.mkdir(parents=True, exist_ok=True)
            access.give_to_tasks(work.run.scratch)
        owner.begin(work.run, self.name)
        sh(commands.up(work.run.compose, work.cluster))

    def watch(self, run: RunFolder) -> str:
        """Return the command that replaces every container of the run when the code in its image changes."""
        composed = run.composed
        base = images.default_base()
        if base.missing:
            raise PrerequisiteError(
                "the image that the others are built from is not on this engine; `invoke image.build`"
            )
        accelerator = composed["services"]["chief"]["image"].rpartition(":")[2]
        path = ROOT / ".build" / f"{project(run.path)}.json"  # not in the run folder, which its tasks can write
        write_json(path, overlay.watched(composed, *images.build_section(accelerator, base)))
        return commands.watch(path)

    def alive(self, run: RunFolder) -> bool:
        """Whether a container of the run runs."""
        label = f"label=com.docker.compose.project={project(run.path)}"
        code, text = engine.ask("ps", "--quiet", "--filter", label)
        return code == 0 and bool(text)

    def remove(self, run: RunFolder, sh: Shell, grace_s: int) -> None:
        """End and remove the run's containers and networks."""
        try:
            sh(commands.ending(run.path, "down", "--timeout", str(grace_s), "--volumes", "--remove-orphans"))
        except Exception as error:
            if not (answer := engine.probe()).ready:
                raise PrerequisiteError(
                    f"{run.name}: in containers, which may go on: {answer.detail}; start the engine, then "
                    "`invoke down` again"
                ) from error
            raise

    def remains(self, runs_dir: Path, names: Collection[str]) -> Remains:
        """Return the runs that the engine has a container or a network of, by their labels.

        The folder of such a run may be gone: its name is a label, and that it is one of this folder shows in its
        project.
        """
        shown = f'{{{{.Label "com.docker.compose.project"}}}}\t{{{{.Label "{RUN_LABEL}"}}}}'
        known = {project(runs_dir / name): name for name in names}
        found = set()
        for words in (["network", "ls"], ["ps", "--all"]):
            code, text = engine.ask(*words, "--format", shown)
            if code:
                return Remains(frozenset(), f"{engine.probe().detail}; start the engine")
            for line in text.splitlines():
                labelled, _, name = line.partition("\t")
                if labelled in known:
                    found.add(known[labelled])
                elif name == Path(name).name and project(runs_dir / name) == labelled:
                    found.add(name)
        return Remains(frozenset(found))

    def faults(self, run: RunFolder) -> FaultInjector:
        """Return what disturbs containers."""
        return ContainerFaults(run)
