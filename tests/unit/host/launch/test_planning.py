"""A plan, its start and its end: what every task gets, what is run, what is left, and what is refused before."""

import os
import shutil
import socket
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.contract import user_code
from cluster.contract.run import claim
from cluster.host.image import engine, images
from cluster.host.launch import configuration, folders, plan, planning, startup
from cluster.host.launch.plan import plan_lines
from cluster.host.options.request import Request
from cluster.host.runtime import resources as limits
from cluster.host.runtime import supervisor
from cluster.host.runtime.local_runtime import LocalProcesses
from cluster.system.errors import EXIT_PREREQUISITE, EXIT_USAGE, ClusterError, PrerequisiteError, UsageError
from cluster.system.files import ROOT
from cluster.system.json_files import read_json
from tests.support.launching import CONFIG, WORKING_ENGINE, Commands, no_shell, refusal


def test_a_plan_as_json_shows_what_every_task_gets(resolved):
    value = planning.plan(Request(name="one", ps=1, evaluator=True, runtime="local")).to_json()
    expected = {"run": "one", "strategy": "ParameterServerStrategy", "replicas": 2, "replica_batch": 192}
    assert expected.items() <= value.items()
    assert ["chief", "worker-0", "worker-1", "ps-0", "evaluator"] == [task["task"] for task in value["tasks"]]
    for task in value["tasks"]:
        cluster = task["tf_config"]["cluster"]
        assert (["chief", "worker", "ps"], 4) == (list(cluster), sum(map(len, cluster.values())))
    assert "auto" == value["tensorboard"]


OPTIMIZER = {"name": "sgd", "learning_rate": 0.1, "warmup_steps": 50, "scaling": "linear", "base_batch": 48}
OPTIMIZER |= {"schedule": "constant", "weight_decay": None, "ema": 0.0, "clip_norm": 0.0}


@pytest.mark.parametrize(
    ("config", "topology", "expected"),
    [
        ({}, {"workers": 5}, {"replicas": 6, "replica_batch": 32}),
        ({"micro_batches": 4}, {"workers": 1}, {"replica_batch": 96, "micro_batches": 4, "micro_batch": 24}),
        # Of virtual shards it is that of the replica with most: of 4 replicas two have one of 6 and two have two.
        ({"bitwise_elastic": 6}, {"workers": 0}, {"replica_batch": 192}),
        ({"bitwise_elastic": 6}, {"workers": 3}, {"replica_batch": 64}),
        ({"bitwise_elastic": 6}, {"workers": 5}, {"replica_batch": 32}),
        (
            {"precision": "bf16", "optimizer": OPTIMIZER | {"clip_norm": 1.5}},
            {"workers": 2},
            {"precision": "bf16", "learning_rate": 0.4, "warmup_steps": 50, "clip_norm": 1.5},
        ),
        (
            {"optimizer": OPTIMIZER, "callbacks": "tutorial"},
            {"workers": 2},
            {"learning_rate": 0.4, "base_learning_rate": 0.1, "warmup_steps": 0},
        ),
        (
            {"optimizer": OPTIMIZER | {"scaling": "none"}},
            {"workers": 2},
            {"precision": "fp32", "learning_rate": 0.1, "base_batch": None, "clip_norm": 0.0},
        ),
    ],
)
def test_a_plan_states_how_the_batch_is_divided_and_what_the_numerics_come_to(monkeypatch, config, topology, expected):
    monkeypatch.setattr(configuration, "resolve_config", lambda *_: (CONFIG | config, (), ""))
    found = planning.plan(Request(runtime="local", **topology)).to_json()
    assert expected.items() <= (found | (found["training"] or {})).items()


@pytest.mark.parametrize(
    ("flags", "config", "faster"),
    [
        ("fpu avx512_bf16", {"onednn": "on"}, True),
        ("amx_bf16 fpu", {"onednn": "on"}, True),
        ("fpu avx2 avx512f", {"onednn": "on"}, False),
        ("avx512_bf16", {"onednn": "off"}, False),
        ("avx512_bf16", {"onednn": "on", "precision": "bf16"}, False),
    ],
)
def test_a_plan_says_where_bf16_is_faster(monkeypatch, tmp_path, flags, config, faster):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(plan, "processor_flags", partial(plan.processor_flags, tmp_path / "cpuinfo"))
    monkeypatch.setattr(
        configuration, "resolve_config", lambda *_: (CONFIG | {"optimizer": OPTIMIZER} | config, (), "")
    )
    value = planning.plan(Request(workers=2, runtime="local")).to_json()
    assert faster == value["training"]["bf16_is_faster"]
    assert faster == ("bf16 is faster" in " ".join(plan_lines(value)))


def test_a_tpu_that_is_not_there_is_reported_before_anything_else(resolved, monkeypatch, tmp_path):
    monkeypatch.delenv("TPU_NAME", raising=False)
    monkeypatch.setattr(planning, "DEVICE_FILES", {"tpu": (f"{tmp_path}/accel*",)})
    error = refusal(Request(strategy="tpu", workers=2, ps=1))
    assert EXIT_PREREQUISITE == error.exit_code
    assert "TPU_NAME" in str(error)
    (tmp_path / "accel0").touch()
    planned = planning.plan(Request(strategy="tpu", devices=8))
    assert ("local", 8) == (planned.runtime.name, planned.cluster.replicas)


@pytest.mark.parametrize("own", [{"overrides": ("--model", "mine:model")}, {"train": ("--model=mine:model",)}])
def test_code_in_a_folder_that_pythonpath_cannot_hold_is_refused(monkeypatch, own):
    monkeypatch.setattr(user_code, "run", lambda *_, **__: pytest.fail("the path was cut at the colon"))
    with pytest.raises(UsageError):
        configuration.resolve_config(Request(code_dir="/a:b", **own))


@pytest.mark.parametrize(
    ("host", "runtime"),
    [("unix:///run/docker.sock", "docker"), ("ssh://builder", "local"), ("tcp://localhost:2375", "local")],
)
def test_an_engine_that_may_not_have_this_machine_s_files_must_be_asked_for(resolved, docker, host, runtime):
    docker(f'[ "$1" = context ] && echo {host} && exit\n{WORKING_ENGINE}')
    planned = planning.plan(Request())
    assert (runtime, runtime == "local") == (planned.runtime.name, host in planned.why_runtime)
    assert "docker" == planning.plan(Request(runtime="docker")).runtime.name


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "docker is not installed"),
        ("echo 'Cannot connect to the Docker daemon.' >&2; exit 1", "Cannot connect to the Docker daemon."),
        ("echo 'permission denied while trying to connect' >&2; exit 1", "permission denied"),
        ("exec /bin/sleep 60", "docker info did not answer in 0.2 s"),
        ("echo '\"\"'", "no Docker Engine answers"),
        ('[ "$1" = info ] && echo \'"26.1.5"\'', "Docker Engine 26.1.5 has no Compose plugin"),
        ('echo \'"26.1.5" ["name=cgroupns","name=rootless"]\'', "Docker Engine 26.1.5 maps users (rootless)"),
        ('echo \'"26.1.5" ["name=userns"]\'', "Docker Engine 26.1.5 maps users (userns)"),
    ],
)
def test_without_an_engine_runs_are_local_and_containers_are_refused(
    resolved, docker, monkeypatch, tmp_path, script, message
):
    monkeypatch.setattr(engine.ask, "__kwdefaults__", {"timeout_s": 0.2 if script and "sleep" in script else 10})
    if script is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        docker(script)
    error = refusal(Request(runtime="docker"))
    assert EXIT_PREREQUISITE == error.exit_code
    assert message in str(error)
    assert ("usermod" in str(error)) is (message == "permission denied")
    planned = planning.plan(Request(runtime="auto"))
    assert "local" == planned.runtime.name
    assert message in planned.why_runtime


@pytest.mark.parametrize(
    "lack",
    [
        lambda m, there: m.setattr(startup.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * 2**20)),
        lambda m, there: m.setattr(limits, "TASK_MEMORY_BYTES", 2**60),
        lambda m, there: m.setenv("RUNS_DIR", "/proc/runs"),
        lambda m, there: m.setenv("RUNS_DIR", str(there / "a file" / "runs")),
    ],
    ids=["disk", "memory", "no folder", "no folder here"],
)
def test_what_a_run_needs_is_looked_for_before_anything_starts(resolved, monkeypatch, tmp_path, lack):
    with socket.create_server(("127.0.0.1", 0)) as server:  # a port in use does not end the start
        request = Request(name="one", runtime="local", tensorboard_port=str(server.getsockname()[1]))
        startup.check_machine(planning.plan(request))
    (tmp_path / "a file").touch()
    lack(monkeypatch, tmp_path)
    planned, commands = planning.plan(request), Commands()
    with pytest.raises(PrerequisiteError):
        startup.start(planned, commands, began=time.time())
    assert [] == commands
    assert not planned.run.path.exists()


def test_a_run_folder_that_cannot_be_written_ends_the_start(resolved, monkeypatch, tmp_path):
    make, started = Path.mkdir, []

    def read_only(path: Path, *arguments: Any, **options: Any) -> None:
        if "run" in path.parts:  # root may write anywhere, so the refusal is played
            raise PermissionError(13, "Permission denied")
        make(path, *arguments, **options)

    planned = planning.plan(Request(name="run", runtime="local", tensorboard_port="0"))
    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(supervisor, "start_supervisor", started.append)
    with pytest.raises(PrerequisiteError, match="RUNS_DIR"):
        startup.start(planned, Commands(), began=time.time())
    assert [] == started


@pytest.fixture
def built(monkeypatch):
    """One command in the place of those that build the images."""
    monkeypatch.setattr(images, "pending_commands", lambda accelerator: ["docker build ."])
    monkeypatch.setattr(images, "inspect_image", lambda image: {"image": image, "id": "sha256:1"})


def test_a_local_start_prepares_data_and_leaves_the_whole_folder(resolved, monkeypatch):
    started, commands = [], Commands()
    monkeypatch.setattr(supervisor, "start_supervisor", started.append)
    requested = {"name": "one", "workers": 1, "runtime": "local", "tensorboard_port": "0"}
    planned = planning.plan(Request(**requested, tag=("wide",), note="a first try"))
    startup.start(planned, commands, began=123.0)
    assert [startup.data_command("prepare", "fashion_mnist")] == commands
    assert [planned.run] == started
    assert (CONFIG, planned.cluster) == (read_json(planned.run.config), planned.run.load_cluster())
    started_as = planned.run.started
    assert (123.0, ("wide",), "a first try") == (started_as.time, started_as.tags, started_as.note)
    assert planned.run == folders.find_run() == folders.find_run("one")
    shutil.rmtree(planned.run.path)
    with pytest.raises(ClusterError):
        folders.find_run()


def test_a_name_that_another_command_has_taken_since_the_plan_is_not_taken_again(resolved, monkeypatch):
    monkeypatch.setattr(supervisor, "start_supervisor", lambda run: None)
    monkeypatch.setattr(claim, "WAIT_S", 0.0)
    monkeypatch.setattr(time, "strftime", lambda *_: "now")
    planned = planning.plan(Request(runtime="local", tensorboard_port="0"))
    with claim.hold_claim(planned.run, "started"), monkeypatch.context() as patch:
        patch.setattr(claim, "_mine", set())  # by another process
        assert f"{planned.run.name}-2" == startup.start_planned(planned, Commands(), began=123.0).run.name


ALL_REPEAT, NEWEST_VARY = {"avx512": [], "avx2": []}, {"avx512": ["MatMul"], "avx2": []}
ALL_VARY = {"avx512": ["MatMul"], "avx2": ["Conv2D 1x1 strided"]}


@pytest.mark.parametrize(
    ("config", "flags", "unverified", "decided", "imports"),
    [
        ({"onednn": "auto"}, set(), ALL_REPEAT, "avx2", ["avx2"]),
        ({"onednn": "auto"}, set(), ALL_VARY, "off", ["avx2", "off"]),
        ({"onednn": "auto"}, {"avx512f"}, ALL_REPEAT, "avx2", ["avx2"]),  # not all that oneDNN needs
        ({"onednn": "auto"}, plan.AVX512, ALL_REPEAT, "avx512", ["avx512"]),
        ({"onednn": "auto"}, plan.AVX512, NEWEST_VARY, "avx2", ["avx512", "avx2"]),
        ({"onednn": "auto"}, plan.AVX512, ALL_VARY, "off", ["avx512", "off"]),
        ({"onednn": "auto"}, plan.AVX512, {}, "off", ["avx512", "off"]),  # not tried
        ({"onednn": "on"}, plan.AVX512, ALL_VARY, "on", ["on"]),  # as requested
        ({"onednn": "auto", "deterministic": False}, plan.AVX512, ALL_REPEAT, "auto", ["auto"]),  # TensorFlow's choice
    ],
)
def test_a_run_records_whether_its_model_computes_with_onednn(
    monkeypatch, capsys, config, flags, unverified, decided, imports
):
    """What imports early assumes that it does, with the newest instructions of this processor."""
    monkeypatch.setattr(plan, "processor_flags", lambda: flags)
    anticipated: list[str] = []
    config = CONFIG | {"deterministic": True} | config
    monkeypatch.setattr(configuration, "resolve_config", lambda *_: (dict(config), (), "ready"))
    monkeypatch.setattr(configuration, "check_config", lambda *_, **__: {"unverified": unverified})
    monkeypatch.setattr(plan, "estimate_memory", lambda _plan: {"parameters": 1})
    monkeypatch.setattr(supervisor, "start_supervisor", lambda *_: None)
    monkeypatch.setattr(
        LocalProcesses, "anticipate", lambda self, work, compose, config: anticipated.append(config["onednn"])
    )
    planned = planning.plan(Request(name="one", runtime="local", tensorboard_port="0"))
    shown = plan.describe_plan(planned)
    assert decided == shown["config"]["onednn"]
    assert (decided != imports[0]) == any("may vary" in note for note in shown["notes"])  # named before the run starts
    startup.start(planned, no_shell, began=123.0)
    assert (decided, imports) == (read_json(planned.run.config)["onednn"], anticipated)
    printed = capsys.readouterr().out  # nothing else: `rerun --json` starts a run, too
    assert (decided != imports[0]) == bool(printed)


DATA = {"text": "9 examples", "version": "1a2b", "seconds": 9.0}
TRIED = {"unverified": ALL_REPEAT, "missing": ["DEBUG_OF_THEIRS", "WIDTH"]}


def test_the_users_functions_are_called_by_what_has_imported(monkeypatch, tmp_path, capsys):
    """The data's at every start, unless --reuse-data is given; the model's with the tasks' variables, without WIDTH."""
    monkeypatch.setenv("WIDTH", "9")
    config = CONFIG | {"dataset": "mine:data", "model": "mine:model", "onednn": "auto", "deterministic": True}
    config |= {"loss": "mean_squared_error", "optimizer": {"name": "adam"}}
    monkeypatch.setattr(configuration, "resolve_config", lambda *_: (dict(config), (tmp_path,), ""))
    monkeypatch.setattr(supervisor, "start_supervisor", lambda *_: None)
    programs: list[str] = []

    def start(command: list[str], environment: dict[str, str]) -> user_code.Program:
        programs.append(command[2])
        assert str(tmp_path) in environment["PYTHONPATH"].split(os.pathsep)
        assert ("4", command[2] == "train.data") == (environment["DEPTH"], "WIDTH" in environment)
        value = DATA if command[2] == "train.data" else TRIED
        reply = f"import sys\nfrom cluster.contract import user_code\nuser_code.reply(lambda: {value!r})"
        return user_code.NewProcess([sys.executable, "-c", reply], ROOT, environment)

    monkeypatch.setattr(LocalProcesses, "program_starter", property(lambda _: start))
    called = []
    for name, options in (("one", {}), ("two", {}), ("three", {"reuse_data": True})):
        planned = planning.plan(Request(name=name, runtime="local", tensorboard_port="0", env=("DEPTH=4",), **options))
        startup.start(planned, no_shell, began=123.0)
        called.append(programs[:])
        programs.clear()
        printed = capsys.readouterr().out
        assert "data: 9 examples" in printed
        assert "--env WIDTH\n" in printed
        assert "1a2b" == read_json(planned.run.data_version)["version"]
    assert [["train.data", "train.startup.preflight"], ["train.data"], []] == called
    planned.run.end("stopped", task="chief")
    monkeypatch.setitem(DATA, "version", "3c4d")
    request = Request(resume="three", runtime="local", tensorboard_port="0")
    startup.start(planning.plan(request), no_shell, began=456.0)
    assert "differ" in capsys.readouterr().out
    assert "1a2b" == read_json(planned.run.data_version)["version"]
    for damage in ("[", "[]", "{}"):  # which the tasks report
        planned.run.end("stopped", task="chief")
        planned.run.data_version.write_text(damage)
        startup.start(planning.plan(request), no_shell, began=789.0)
        assert "differ" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("onednn", "flags", "warned"), [("avx512", set(), True), ("avx512", plan.AVX512, False), ("avx2", set(), False)]
)
def test_other_bits_on_a_processor_without_the_recorded_instructions_are_announced(monkeypatch, onednn, flags, warned):
    monkeypatch.setattr(plan, "processor_flags", lambda: flags)
    monkeypatch.setattr(configuration, "resolve_config", lambda *_: (CONFIG | {"onednn": onednn}, (), ""))
    assert warned == any("avx512" in note for note in planning.plan(Request(runtime="local")).notes)


@pytest.mark.usefixtures("resolved")
def test_what_imported_stays_as_long_as_requested_or_configured(monkeypatch, tmp_path):
    def kept(**options: Any) -> float:
        return planning.plan(Request(tensorboard_port="0", **{"runtime": "local", **options})).keep_s

    assert (0, 0) == (kept(), kept(keep_warm="15m"))  # no private folder for its socket
    (tmp_path / "runtime").mkdir()
    assert (0, 900) == (kept(), kept(keep_warm="15m"))
    assert not [*(tmp_path / "runtime").iterdir()]  # a plan leaves nothing
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "tf-cluster" / "config.toml"
    file.parent.mkdir()
    file.write_text('keep-warm = "2h"\n')
    assert (7200, 0) == (kept(), kept(keep_warm="0"))
    monkeypatch.setenv("SHARED_IMPORT", "0")
    assert 0 == kept()
    for wrong in ({"keep_warm": "15m"}, {"keep_warm": "soon"}):
        assert EXIT_USAGE == refusal(Request(runtime="local", **wrong)).exit_code
    monkeypatch.delenv("SHARED_IMPORT")
    for text in ("workers = 1\n", 'keep-warm = "soon"\n', "[train]\nepochs = 1\n"):
        file.write_text(text)
        assert EXIT_USAGE == refusal(Request(runtime="local")).exit_code


def test_a_container_start_builds_images_then_brings_up_every_task(resolved, built, docker):
    calls, commands = docker(WORKING_ENGINE), Commands()
    planned = planning.plan(Request(name="one", workers=1, tensorboard_port="0"))
    startup.start(planned, commands, began=time.time())
    assert commands == startup.list_commands(planned)
    assert startup.data_command("prepare", "fashion_mnist") == commands[0]
    assert "docker build ." == commands[1]
    assert commands[2].endswith("up --detach --no-build --pull never chief worker-0")
    assert f"-f {planned.run.compose}" in commands[2]
    assert {"info", "compose", "context"} == {call.split()[0] for call in calls.read_text().splitlines()}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_root_hands_the_run_folder_to_the_unprivileged_user(resolved, built, docker):
    docker(WORKING_ENGINE)
    planned = planning.plan(Request(name="one", workers=0, tensorboard_port="0"))
    startup.start(planned, Commands(), began=time.time())
    paths = [planned.run.path, *planned.run.path.rglob("*")]
    assert {(10001, 10001)} == {(path.stat().st_uid, path.stat().st_gid) for path in paths}
