"""The cluster as a stack of a Docker Swarm: a service for each task, on whichever hosts the Swarm has.

The engine that Docker's client talks to (DOCKER_HOST) must be a manager's. What runs is always a command that `--dry`
prints and one can paste. What runs first in each container is `cluster/agent/schedulers/service.py`.
"""

import shlex
import sys
import time
from collections.abc import Collection
from types import MappingProxyType
from typing import Any

from cluster.contract.run.folder import RunFolder
from cluster.host.image import engine, images
from cluster.host.image.engine import Availability
from cluster.host.runtime import resources
from cluster.host.runtime.base import Finding, ScheduledRuntime, Shell, Workload
from cluster.host.runtime.compose_runtime import ContainerFaults, ContainerRuntime
from cluster.host.runtime.resources import Memory, Network, parse_memory
from cluster.host.schedulers import swarm_stack
from cluster.system.errors import ClusterError, PrerequisiteError, TimedOut
from cluster.system.messages import last_output_line
from cluster.system.waiting import wait_until


class SwarmFaults(ContainerFaults):
    """Disturbs the containers of a stack."""

    storm = frozenset({"kill", "pause", "slow", "corrupt"})
    refusals = MappingProxyType(
        {
            "partition": "a service's container cannot be connected again; cut off its host, or use --runtime docker",
            "lose": "the Swarm would start it again; cut off or drain its host, or use --runtime docker",
            "oom": "a limit of a service is not changed in place; use a run of --runtime docker",
        }
    )

    def _engine(self, task: str) -> tuple[str, ...]:
        service = f"{swarm_stack.stack_name(self._run.path)}_{task}"
        running = ("--filter", "desired-state=running", "--format", "{{.Node}}")
        shown = swarm_stack.ask_manager("service", "ps", *running, service)
        on = shown.splitlines()[0] if shown else ""
        node = next((candidate for candidate in swarm_stack.list_nodes() if candidate.name == on), None)
        if node is None:
            raise ClusterError(f"{task} runs on no host of the Swarm now; `docker service ps {service}` says why")
        if node.is_manager:
            return ()
        if not node.engine:
            raise ClusterError(
                f"{task} is on {node.name}, whose engine is not known; `docker node update --label-add "
                f"{swarm_stack.ENGINE_LABEL}=ssh://{node.name} {node.name}`"
            )
        return ("--host", node.engine)

    def _filters(self, task: str) -> list[str]:
        return [f"label=com.docker.swarm.service.name={swarm_stack.stack_name(self._run.path)}_{task}"]


START_S = 60.0
"""How long the Swarm gets to place and start every task before the command returns."""
UNPLACED_S = 20.0
"""How long a task may be without a host before that is an error: a Swarm decides in a second, and tries again."""
END_S = 90.0
"""Longest wait for a stack to be gone, whose tasks get 60 s to save."""
POLL_S = 0.5


class Swarm(ContainerRuntime, ScheduledRuntime):
    """Services of a Docker Swarm, whose hosts share the folders of runs and data."""

    name = "swarm"
    tasks = "services of a Swarm"
    look_s = 2.0
    way_back = "set DOCKER_HOST to a manager's engine"
    job_options = frozenset({"constraint", "cpus_per_task", "gpus_per_task"})
    injector = SwarmFaults

    def probe(self) -> Availability:
        swarm, text = engine.ask_info("Swarm")
        if not swarm:
            return engine.unavailable(f"no Docker Engine answers ({last_output_line(text)})")
        if swarm.get("LocalNodeState") != "active":
            fix = "`docker swarm init`, or set DOCKER_HOST to a manager's"
            return Availability(False, "this Docker Engine is in no Swarm", fix)
        if not swarm.get("ControlAvailable"):
            return Availability(False, "this Docker Engine is a worker of its Swarm", self.way_back)
        return Availability(True, f"a Swarm of {swarm.get('Nodes', 1)}")

    def examine(self) -> list[Finding]:
        if not self.probe().ready:
            return []
        found = swarm_stack.list_nodes()
        away = [f"{node.name} ({node.obstacle})" for node in found if node.obstacle]
        if away:
            fix = "docker node update --availability active"
            return [Finding("swarm", "warning", f"no tasks on {', '.join(away)}", fix)]
        return [Finding("swarm", "ok", ", ".join(node.name for node in found))]

    def memory(self, requested: str, num_tasks: int) -> Memory:  # noqa: ARG002  # on other machines
        return Memory(requested, parse_memory(requested))

    def network(self, requested: str, previous: str, *, way_out: str, serves: bool) -> Network:
        typed = requested or previous
        resources.check_network(typed, resources.PRIVATE, resources.ENCRYPTED)
        if not serves or (typed == resources.ENCRYPTED and not way_out):
            return Network(typed or resources.PRIVATE, typed)
        open_to = "all who are on the network between the hosts (UDP port 4789) reach them"
        if typed == resources.ENCRYPTED:
            open_to = f"all who are on one of the hosts reach them, because the tasks are {way_out}"
        warning = f"{resources.UNPROTECTED} {open_to}"
        use = "; --network encrypted closes that, or a network that only the hosts are in" if not way_out else ""
        return Network(typed or resources.PRIVATE, typed, f"{warning}{use}: see docs/guides/swarm.md")

    def describe(self, work: Workload) -> dict[str, Any]:
        return swarm_stack.render_stack(work)

    def preflight(self, work: Workload, ending: int = 0) -> None:  # noqa: ARG002  # the Swarm places by what is free
        """Check that a host takes tasks at all; which one has what they reserve, only the Swarm can say."""
        if all(node.obstacle for node in swarm_stack.list_nodes()):
            raise PrerequisiteError("no host of the Swarm takes tasks; `docker node ls` says why")

    def prepare(self, work: Workload, sh: Shell, *, renew: bool = True) -> None:
        super().prepare(work, sh, renew=renew)
        image = images.train_image(work.accelerator)
        commands, unknown = swarm_stack.carry_commands(image)
        for command in commands:
            sh(command)
        if unknown:
            host = unknown[0]
            print(
                f"whether {', '.join(unknown)} has {image} is not known; bring it there with `docker save {image} | "
                f"docker --host ssh://{host} load`, or have `up` do that: `docker node update --label-add "
                f"{swarm_stack.ENGINE_LABEL}=ssh://{host} {host}`",
                file=sys.stderr,
            )

    def commands(self, work: Workload) -> list[str]:
        build, deploy = images.pending_commands(work.accelerator), self.start_commands(work)
        return [*build, *swarm_stack.carry_commands(images.train_image(work.accelerator))[0], *deploy]

    def start(self, work: Workload, sh: Shell) -> None:
        """Deploy the stack, and see every task placed."""
        super().start(work, sh)
        _await_places(swarm_stack.stack_name(work.run.path), {task.name for task in work.cluster.tasks})

    def start_commands(self, work: Workload) -> list[str]:
        name = swarm_stack.stack_name(work.run.path)
        label = f"--label=com.docker.stack.namespace={name}"  # removed with the stack
        create = []
        for variable in work.payload.caller_variables:
            words = ["docker", "secret", "create", label, swarm_stack.secret_name(name, variable), "-"]
            create.append(f'printf %s "${variable}" | {shlex.join(words)}')
        # A name that is not resolved means the same image on every host, which it was carried to or pulls by itself.
        options = ["--detach=true", "--resolve-image=never", f"--compose-file={work.run.compose}"]
        return [*create, shlex.join(["docker", "stack", "deploy", *options, name])]

    def scheduled_name(self, run: RunFolder) -> str:
        return swarm_stack.stack_name(run.path)

    def has_tasks(self, name: str) -> bool:
        try:
            return bool(swarm_stack.stack_tasks(name, "running", "ready"))
        except PrerequisiteError:  # the stack is unknown, or no Swarm answers
            return not self.probe().ready

    def scheduled(self) -> Collection[str]:
        return swarm_stack.ask_manager("stack", "ls", "--format", "{{.Name}}").split()

    def remove(self, run: RunFolder, sh: Shell, grace_s: int) -> None:  # noqa: ARG002  # the stack says how long
        if not (available := self.probe()).ready:
            raise PrerequisiteError(
                f"{run.name}: on a Swarm, where it may continue: {available.detail}; {available.fix}"
            )
        name = swarm_stack.stack_name(run.path)
        if name in self.scheduled():
            sh(shlex.join(["docker", "stack", "rm", "--detach=false", name]))
        for secret in swarm_stack.stack_parts("secret", name):  # of a start that failed before it deployed
            sh(shlex.join(["docker", "secret", "rm", secret]))
        if not wait_until(lambda: not swarm_stack.stack_parts("network", name), END_S, POLL_S):
            raise TimedOut(f"the network of {run.name} does not end; `docker network inspect --verbose` says why")


def _await_places(name: str, expected: Collection[str]) -> None:
    """Return once every task has a host that starts it, or after `START_S`."""
    began = time.monotonic()
    while (passed_s := time.monotonic() - began) < START_S:
        placed = set()
        for task in swarm_stack.stack_tasks(name):
            if task.state == "rejected":
                raise PrerequisiteError(f"{task.service} cannot start on {task.node}: {task.error}; {_fix(task.error)}")
            if task.state == "pending" and task.error and passed_s > UNPLACED_S:
                raise PrerequisiteError(f"no host takes {task.service}: {task.error}; request less, or add hosts")
            if task.state in ("starting", "running", "complete", "failed"):
                placed.add(task.service)
        if placed >= set(expected):
            return
        time.sleep(POLL_S)


def _fix(error: str) -> str:
    if "No such image" in error:
        return "bring the image there; docs/guides/swarm.md says how"
    if "does not exist" in error:
        return "put RUNS_DIR and DATA_DIR into folders that every host has under the same path"
    return "`docker service ps --no-trunc` says more"
