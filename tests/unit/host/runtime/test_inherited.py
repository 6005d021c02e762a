"""Variables that tasks inherit from the caller of `up`: those of a list, and no others."""

import json
import os
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest

from cluster.contract import settings, spec
from cluster.contract.run.folder import RunFolder
from cluster.host.launch import planning
from cluster.host.launch.user_files import lay_out
from cluster.host.options.request import Request
from cluster.host.runtime import compose_runtime, payload
from cluster.host.runtime.compose_runtime import UNPRIVILEGED, render_overlay
from cluster.host.runtime.local_runtime import processes_of
from cluster.host.runtime.payload import Payload
from cluster.system.errors import PrerequisiteError, UsageError
from cluster.system.json_files import read_json, write_json
from tests.support.launching import refusal, workload

STALE = {
    "TF_CONFIG": "garbage",
    "TASK": "worker-9",
    "RUN_DIR": "/elsewhere",
    "GATE_FD": "7",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "MY_OWN": "value",
    "PYTHONSAFEPATH": "1",
    "PYTHONOPTIMIZE": "2",
    "PYTHONSTARTUP": "/nowhere",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=true",
    "LC_TIME": "C",
    "MALLOC_ARENA_MAX": "2",
}


@pytest.fixture
def stale(monkeypatch):
    """The environment of a user with variables of other programs."""
    for name, value in STALE.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("stale")
def test_a_task_sees_what_is_listed_and_what_options_add_and_nothing_else(make_run, start_run, theirs, tmp_path):
    (tmp_path / "key").write_text("precious\n")
    theirs.write_text("import json, os; json.dump(dict(os.environ), open('seen.json', 'w'))")
    given = Payload(theirs, env=("MY_OWN", "ANOTHER=a=b c", "EMPTY="), secrets={"A_KEY": tmp_path / "key"})
    run = make_run(workers=0)
    cluster = run.load_cluster()
    more = given.environment(cluster, given.local_path())
    write_json(run.config, given.to_json())
    write_json(run.compose, processes_of(cluster, run.path, tmp_path / "data", given.command(), more))
    lay_out(theirs, run, cluster, theirs.parent)
    assert "succeeded" == start_run(run).summary()["state"]
    seen = read_json(run.work("chief") / "seen.json")
    inherited = {name for name in STALE if seen.get(name) == STALE[name]}
    assert {"XLA_FLAGS", "LC_TIME", "MY_OWN", "MALLOC_ARENA_MAX"} == inherited
    assert ("chief", None, "") == (seen["TASK"], seen.get("TF_CONFIG"), seen["grpc_proxy"])  # it calls other tasks
    added = {"A_KEY": "precious", "MY_OWN": "value", "ANOTHER": "a=b c", "EMPTY": ""}
    assert added.items() <= seen.items()
    assert added.items() <= (given.trial_environment() | {"MY_OWN": "value"}).items()
    unlisted = {
        name
        for name in seen
        if name not in payload.PROCESS | payload.NEVER_INHERITED | set(payload.PROXIES)
        and not name.startswith((*payload.PREFIXES, *payload.DEVICE_PREFIXES, "LC_"))
    }
    assert {"RESTART_PAUSE_S", "STANDBY", "PYTHONUNBUFFERED", "grpc_proxy"} | set(added) == unlisted


@pytest.mark.usefixtures("stale")
def test_a_value_of_the_caller_s_is_written_nowhere(tmp_path):
    payload = Payload(env=("AWS_SECRET_ACCESS_KEY",))
    cluster = spec.build(1)
    processes = processes_of(
        cluster, tmp_path, tmp_path, payload.command(), payload.environment(cluster, payload.local_path())
    )
    assert ["AWS_SECRET_ACCESS_KEY"] == processes["inherits"]
    services = render_overlay(workload(RunFolder(tmp_path / "run"), payload=payload))
    for service in services["services"].values():
        seen = service["environment"]
        assert (None, None) == (seen["AWS_SECRET_ACCESS_KEY"], seen["XLA_FLAGS"])  # passed on by name
        assert not {"MY_OWN", "PYTHONOPTIMIZE", "LC_TIME", "PATH", "HOME"} & seen.keys()
        assert "garbage" != seen["TF_CONFIG"]
    assert "secret" not in json.dumps([processes, services])


def test_paths_of_this_machine_are_for_its_processes(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_HOME", "/home/me/.keras")
    assert "KERAS_HOME" in payload.process_variables()
    assert "KERAS_HOME" not in payload.container_variables(way_out=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"mine{os.pathsep}{os.pathsep}/theirs")
    assert f"{tmp_path / 'mine'}{os.pathsep}/theirs" == payload.process_variables()["PYTHONPATH"]


VARIABLES = ["", "=1", "A B=1", "1A=1", "TF_CONFIG={}", "TASK", "PYTHONPATH=/x", "NOT_SET_HERE", "Ä=1"]
SECRETS = ["", "A_KEY", "A_KEY=", "A B=key", "TASK=key", "A_KEY=none", "A_KEY=~nobody-here/key", "A_KEY=.", "B=key"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "words"), [*(("env", words) for words in VARIABLES), *(("secret", words) for words in SECRETS)]
)
def test_what_can_be_no_variable_or_secret_of_a_task_is_refused(option, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("precious")
    requested = {"secret": (words,), "env": ("B=1",)} if option == "secret" else {"env": (words,)}
    refused = refusal(Request(**requested, runtime="local", tensorboard_port="0"))
    assert isinstance(refused, UsageError)
    assert f"--{option}" in str(refused)
    assert "precious" not in str(refused)


def test_a_secret_that_is_gone_is_named(tmp_path):
    with pytest.raises(PrerequisiteError, match="A_KEY"):
        settings.read_secrets({"A_KEY": tmp_path / "none"})


@pytest.mark.parametrize(
    ("mode", "owner", "readable"), [(0o600, 0, False), (0o600, UNPRIVILEGED, True), (0o644, 0, True)]
)
def test_containers_that_root_starts_can_read_a_secret_or_it_is_refused(monkeypatch, tmp_path, mode, owner, readable):
    key = tmp_path / "key"
    key.write_text("precious")
    status = list(key.stat())
    status[0], status[4] = stat.S_IFREG | mode, owner
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(Path, "stat", lambda *_, **__: os.stat_result(status))
    with nullcontext() if readable else pytest.raises(PrerequisiteError, match="chown"):
        compose_runtime.check_readable(Payload(secrets={"A_KEY": key}))


def test_a_run_continues_with_its_variables(theirs, stopped_run, tmp_path):
    (tmp_path / "key").write_text("precious")
    stopped_run(name="one", workers=0, script=str(theirs), env=("A=1",), secret=(f"B={tmp_path / 'key'}",))
    planned = planning.plan(Request(resume="one", runtime="local", tensorboard_port="0"))
    assert (("A=1",), {"B": tmp_path / "key"}) == (planned.payload.env, planned.payload.secrets)
    assert "1" == planned.compose["tasks"]["chief"]["environment"]["A"]
    planned = planning.plan(Request(resume="one", runtime="local", tensorboard_port="0", env=("C=3",)))
    assert (("A=1", "C=3"), {"B": tmp_path / "key"}) == (planned.payload.env, planned.payload.secrets)
