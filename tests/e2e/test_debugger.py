"""A task that waits for a debugger, attached to with the protocol of debuggers."""

import time

import pytest

from cluster.agent.watchdog import SILENT_S
from tests.e2e.scenario import TRAINING, Clusters, summary
from tests.support.debug_client import Client, free_port
from tests.support.waiting import wait_for


def debug(clusters: Clusters, name: str, runtime: str, *, hold_s: float = 0) -> None:
    """Attach to a worker, hold it in the middle of training until it was silent for `hold_s`, and let it continue."""
    pytest.importorskip("debugpy", reason="debugpy is in requirements/dev.lock")
    port, run = free_port(), clusters.run(name)
    up = clusters.popen(
        *("up", f"--name={name}", "--workers=1", f"--debug=worker-0:{port}", f"--runtime={runtime}"),
        *("--tensorboard-port=0", "--", *TRAINING),
    )
    try:
        wait_for(lambda: "waits for a debugger" in [each.event for each in run.events()], "the task", 200)
        client = Client(port)
        client.attach()
        client.request("setFunctionBreakpoints", breakpoints=[{"name": "end_call"}])
        client.request("configurationDone")
        stopped = client.until("event", "stopped")
        wait_for(lambda: time.time() - run.heartbeats()["worker-0"].updated_at > hold_s, "silence", 60)
        client.request("setFunctionBreakpoints", breakpoints=[])
        client.request("continue", threadId=stopped["body"]["threadId"])
        output, _ = up.communicate(timeout=200)
        assert 0 == up.returncode, output
    finally:
        up.kill()
    assert f"worker-0 waits for a debugger on 127.0.0.1:{port}" in output
    assert ("succeeded", []) == (summary(run)["state"], summary(run)["restarts"])


@pytest.mark.long  # `tests/unit/train/startup/test_debugger.py` attaches each time
def test_a_process_is_debugged(clusters):
    debug(clusters, "debugged", "local")


@pytest.mark.long
@pytest.mark.docker
@pytest.mark.usefixtures("require_engine", "images")
def test_a_container_is_held_for_longer_than_a_silent_task_may_last(clusters):
    debug(clusters, "debugged-docker", "docker", hold_s=SILENT_S + 2)
