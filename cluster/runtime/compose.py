"""The cluster as containers: the Compose commands that run it, and its runtime.

`overlay.py` describes the services. What is run is always a command that `--dry` prints and one can paste.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cluster.errors import PrerequisiteError
from cluster.findings import Finding
from cluster.image import build, engine, images
from cluster.paths import ROOT
from cluster.run import owner, provenance
from cluster.run.folder import RunFolder
from cluster.runtime import inherited, memory, overlay, toolkit
from cluster.runtime.base import Availability, Remains, Runtime, Shell, Workload
from cluster.runtime.faults import ContainerFaults, FaultInjector
from cluster.runtime.memory import Memory
from cluster.runtime.overlay import FILES, RUN_LABEL, UNPRIVILEGED, Containers, project, task_user, tensorboard_project
from cluster.runtime.payload import Payload
from cluster.spec import ClusterSpec
from cluster.system import files


def command(overlay_path: Path, *words: str) -> str:
    """Return a `docker compose` command on a run's services, as its overlay says."""
    files = ["-f", str(FILES / "compose.yaml"), "-f", str(overlay_path)]
    return shlex.join(["docker", "compose", "--progress=quiet", "--project-directory", str(ROOT), *files, *words])


def ending(run_dir: Path, *words: str) -> str:
    """Return a `docker compose` command that ends what a run started.

    By the labels that the engine keeps, without the overlay: tasks can rewrite that, and Compose would do on the host,
    and with other projects, what it then says.
    """
    return shlex.join(["docker", "compose", "--progress=quiet", "--project-name", project(run_dir), *words])


def up(overlay_path: Path, spec: ClusterSpec) -> str:
    """Return the command that starts the tasks."""
    names = [task.name for task in spec.tasks]
    return command(overlay_path, "up", "--detach", "--no-build", "--pull", "never", *names)


def tensorboard(runs_dir: Path, port: int, *words: str) -> str:
    """Return a command on the TensorBoard that shows `runs_dir` on 127.0.0.1:`port`."""
    settings = {"RUNS_DIR": str(runs_dir), "TENSORBOARD_PORT": str(port), "TASK_USER": task_user()}
    compose = [
        "docker",
        "compose",
        "--progress=quiet",
        "--project-directory",
        str(ROOT),
        "-f",
        str(FILES / "compose.yaml"),
    ]
    compose += ["-p", tensorboard_project(runs_dir), "--profile", "tensorboard", *words]
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items()) + " " + shlex.join(compose)


def environment(payload: Payload, spec: ClusterSpec) -> dict[str, str | None]:
    """Return the variables that containers get for a payload, and what they take over from the caller."""
    seen = payload.mounted()
    return inherited.for_container(way_out=payload.script is not None) | seen.environment(spec, seen.path)


class Compose(Runtime):
    """Containers of a Docker Engine, by `docker compose`."""

    name = "docker"
    tasks = "containers"
    automatic = True
    limits_memory = True
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

    def seen(self, payload: Payload) -> Payload:
        """Return the payload as containers have it mounted."""
        return payload.mounted()

    def render(self, work: Workload) -> dict[str, Any]:
        """Return the Compose overlay of the run."""
        payload = work.payload
        check_readable(payload, task_user())
        provenance.check_hidden([work.run.path.parent, work.data_dir, *(folder for folder, _ in payload.mounts())])
        containers = Containers(
            work.run.path,
            work.data_dir,
            images.train_image(work.gpus.accelerator),
            task_user(),
            work.memory.task_bytes,
            payload.mounts(),
            environment(payload, work.cluster),
            way_out=payload.script is not None,
            gpus=work.gpus,
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
        return [*build.commands(work.gpus.accelerator), up(work.run.compose, work.cluster)]

    def start(self, work: Workload, sh: Shell) -> None:
        """Give the tasks' user what it reads and writes, and start the containers."""
        _let_tasks_read(work.run.path.parent, work.data_dir)
        _give_to_tasks(work.run.path)
        if work.payload.script:
            work.run.scratch.mkdir(parents=True, exist_ok=True)
            _give_to_tasks(work.run.scratch)
        owner.begin(work.run, self.name)
        sh(up(work.run.compose, work.cluster))

    def alive(self, run: RunFolder) -> bool:
        """Whether a container of the run runs."""
        label = f"label=com.docker.compose.project={project(run.path)}"
        code, text = engine.ask("ps", "--quiet", "--filter", label)
        return code == 0 and bool(text)

    def remove(self, run: RunFolder, sh: Shell, grace_s: int) -> None:
        """End and remove the run's containers and networks."""
        try:
            sh(ending(run.path, "down", "--timeout", str(grace_s), "--volumes", "--remove-orphans"))
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


def check_readable(payload: Payload, user: str) -> None:
    """Check that containers can read what is mounted: where root starts them they run as another user.

    Raises:
        PrerequisiteError: they cannot.
    """
    if os.getuid() != 0:
        return
    files = [(payload.script, stat.S_IROTH)] if payload.script else []
    for path, bits in [*files, *((folder, stat.S_IROTH | stat.S_IXOTH) for folder, _ in payload.mounts())]:
        if path == payload.packages:
            continue  # perhaps not installed yet, and readable whatever the umask
        if path.stat().st_mode & bits != bits:
            raise PrerequisiteError(
                f"containers run as user {user}, who cannot read {path}: `chmod -R o+rX {shlex.quote(str(path))}`, "
                "or use --runtime local"
            )


def _let_tasks_read(runs_dir: Path, data_dir: Path) -> None:
    """Let the user that the containers run as read what root prepared, perhaps under another umask."""
    if os.getuid() != 0:
        return
    runs_dir.chmod(runs_dir.stat().st_mode | 0o055)  # TensorBoard reads all runs as that user
    if not data_dir.exists():
        return
    if (mode := data_dir.stat().st_mode) & 0o055 != 0o055:
        data_dir.chmod(mode | 0o055)
    for folder in ("arrays", "shards"):
        files.make_readable(data_dir / folder)


def _give_to_tasks(folder: Path) -> None:
    """Give a folder to the user that the containers run as, where root starts them; never what a link in them names."""
    if os.getuid() != 0:
        return
    for _, inside, others, descriptor in os.fwalk(folder):
        for name in (".", *inside, *others):
            os.chown(name, UNPRIVILEGED, UNPRIVILEGED, dir_fd=descriptor, follow_symlinks=False)
