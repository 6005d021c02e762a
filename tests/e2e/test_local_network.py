"""Real TensorFlow servers of local processes: they listen for everybody, and nobody is there."""

from pathlib import Path

import pytest

from cluster.host.runtime import namespaces, supervisor
from cluster.system.json_files import read_json
from tests.e2e.scenario import ENDLESS, TRAINING, step_of
from tests.support import doors
from tests.support.waiting import wait_for

LISTENS = "0A"
"""How /proc writes that state of a socket."""
ANYWHERE = {"0" * 8, "0" * 32}


def listening(pid: int) -> set[int]:
    """Return the ports on which something listens on every interface of a process' network."""
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables for line in table]
    return {
        int(at.rpartition(":")[2], 16)
        for _, at, _, state, *_ in sockets
        if state == LISTENS and at.rpartition(":")[0] in ANYWHERE
    }


@pytest.mark.parametrize("network", ["private", pytest.param("host", marks=pytest.mark.long)])
def test_servers_must_be_reached_in_the_machine_s_network_alone(clusters, network):
    if network == "private" and (refused := namespaces.refusal()):
        pytest.skip(refused.why)
    options = (f"--name={network}", "--runtime=local", "--tensorboard-port=0", f"--network={network}", "--workers=1")
    output = clusters.invoke("up", *options, "--detach", "--", *TRAINING, *ENDLESS)
    assert (network == "host") == ("warning: TensorFlow's servers ask for no password" in output)
    run = clusters.run(network)
    assert network == read_json(run.manifest)["network"]
    wait_for(lambda: step_of(run) > 0, "the first step")
    tasks = run.load_cluster().tasks
    pid = read_json(run.programs("chief"))["program"]["pid"]
    assert {task.port for task in tasks} <= listening(pid)  # TensorFlow's doing, whatever address it is given
    everywhere = {(address, task.port) for address in doors.addresses() for task in tasks}
    found = {door for door in everywhere if doors.speaks(*door)}
    clusters.invoke("down", network)
    assert (set() if network == "private" else everywhere) == found
    assert [] == supervisor.processes_left(run)
