"""What can be done to a task of a Swarm from outside: by the engine of the host that it is on."""

from __future__ import annotations

from types import MappingProxyType

from cluster.host.runtime.compose.faults import ContainerFaults
from cluster.host.runtime.swarm import nodes, stack
from cluster.system.errors import ClusterError


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
        service = f"{stack.name(self._run.path)}_{task}"
        shown = nodes.ask("service", "ps", "--filter", "desired-state=running", "--format", "{{.Node}}", service)
        on = shown.splitlines()[0] if shown else ""
        node = next((each for each in nodes.nodes() if each.name == on), None)
        if node is None:
            raise ClusterError(f"{task} runs on no host of the Swarm now; `docker service ps {service}` says why")
        if node.own:
            return ()
        if not node.engine:
            raise ClusterError(
                f"{task} is on {node.name}, whose engine is not known; `docker node update --label-add "
                f"{nodes.ENGINE_LABEL}=ssh://{node.name} {node.name}`"
            )
        return ("--host", node.engine)

    def _filters(self, task: str) -> list[str]:
        return [f"label=com.docker.swarm.service.name={stack.name(self._run.path)}_{task}"]
