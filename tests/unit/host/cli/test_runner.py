"""Commands that a task runs end with it."""

import pytest
from invoke import Config, Context

from cluster.host.cli.runner import Runner


def test_a_command_that_is_interrupted_before_anybody_waits_for_it_is_ended(monkeypatch):
    started: list[Runner] = []

    def interrupt(runner: Runner) -> None:
        started.append(runner)
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "create_io_threads", interrupt)
    runner = Runner(Context(Config(overrides={"run": {"in_stream": False}})))
    with pytest.raises(KeyboardInterrupt):
        runner.run("sleep 600")
    assert [runner] == started
    assert runner.process is not None
    assert runner.process.wait(5) != 0
