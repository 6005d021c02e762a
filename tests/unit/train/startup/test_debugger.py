"""A task that waits for a debugger continues once one is attached; all others continue at once."""

import os
import subprocess
import sys

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.system.paths import ROOT
from tests.support.debug_client import Client, free_port
from train.startup import debugger

PROGRAM = """
import sys
from pathlib import Path
from cluster.contract.run.folder import RunFolder
from train.startup import debugger
debugger.wait_for_client(RunFolder(Path(sys.argv[1])), "worker-0")
print("it continues")
"""


@pytest.mark.slow
def test_a_task_waits_until_a_debugger_is_attached(tmp_path):
    pytest.importorskip("debugpy", reason="debugpy is in requirements/dev.lock")
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"DEBUGPY_LISTEN": f"127.0.0.1:{port}"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout
            assert f"worker-0 waits for a debugger on 127.0.0.1:{port}\n" == process.stdout.readline()
            assert ["waits for a debugger"] == [each.event for each in RunFolder(tmp_path).events()]
            client = Client(port)
            client.attach()
            assert process.poll() is None
            client.request("configurationDone")
            assert "it continues\n" == process.stdout.readline()
            client.close()
            assert 0 == process.wait(60)
        finally:
            process.kill()


def test_other_tasks_continue_at_once(monkeypatch, tmp_path):
    monkeypatch.delenv("DEBUGPY_LISTEN", raising=False)
    debugger.wait_for_client(RunFolder(tmp_path), "worker-0")
    assert [] == list(RunFolder(tmp_path).events())
