"""Hostile words: they stay the words that they are, in commands, overlays, paths and TF_CONFIG, or are refused."""

import csv
import io
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from invoke import Context, Exit

from cluster.contract import spec, tf_config
from cluster.contract.run.folder import RunFolder
from cluster.host.cli.command_line import report_errors
from cluster.host.image import engine, images
from cluster.host.launch import folders, planning, startup
from cluster.host.launch.user_files import check_script
from cluster.host.nvidia import Placement
from cluster.host.options.request import Request
from cluster.host.runtime import compose_runtime, registry, supervisor, tensorboard
from cluster.host.runtime.compose_runtime import ContainerFaults
from cluster.host.runtime.payload import Payload
from cluster.system.errors import EXIT_USAGE, UsageError
from cluster.system.json_files import write_json
from tests.support import command_line
from tests.support.launching import workload

NASTY = [
    "; rm -rf ~ #", "$(id)", "`id`", "${HOME}", "$HOME", "$$", "$", "a b", "' \" \\", "'; id; '", "*", "", " ", "%n",
    "x\nsecond line", "\r", "\x1b]0;title\x07", "\x1b[2J", "\u202eback", "\u2028", "\n- privileged: true", "~", "!!int",
    "..", "../..", "/etc/passwd", ".", "-", "-rf", "--help", "a:b", "a,b", "{}", "}}", "&a", "*a", "#",
]  # fmt: skip
TEXT = st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
"""What can be typed: anything but NUL, which ends a word for the system itself."""
FILE = TEXT.map(lambda text: text.replace("/", "")).filter(lambda name: name not in ("", ".", ".."))
ANY = TEXT | st.text(max_size=30)
"""And what another program could hand over, or a record hold."""

unhurried = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)


def outcome(parse: Callable[..., Any], *words: str) -> Any:
    """Return the parsed value, or the error that refuses the words in one line."""
    try:
        return parse(*words)
    except UsageError as error:
        return error if "\n" not in str(error) else pytest.fail(f"more than a line: {error}")


def refused(task: str, **options: Any) -> str:
    """Return the one line with which a task refuses its options as wrong usage."""
    code, message = command_line.refusal(task, **options)
    assert (EXIT_USAGE, True) == (code, message.startswith("error: "))
    assert message.isprintable()  # one line, and nothing that a terminal obeys
    return message


@pytest.mark.slow
@pytest.mark.parametrize("task", ["status", "logs", "wait", "stop", "down", "rerun", "export"])
def test_no_task_takes_a_run_name_that_is_none(task):
    for name in ("..", "../x", "/etc", "a\0b", "a\nb", "-rf", "~"):
        assert "run name " in refused(task, run=name)
    for path in ("a\0b", "a\nb", "\x1b[2J"):
        assert f"--script {path!r}" in refused("plan", script=path)


@unhurried
@given(ANY)
@example("nan")
@example("inf")
@example("-1")
def test_words_are_what_they_are_meant_to_be_or_refused(word):
    taken = outcome(spec.check_run_name, word)
    if taken == word:
        run = RunFolder(folders.runs_dir() / word)
        assert folders.runs_dir() == Path(os.path.normpath(run.path)).parent
        assert re.fullmatch(r"[a-z0-9][a-z0-9_-]*", compose_runtime.project(run.path))
    else:
        assert isinstance(taken, UsageError)
    number = outcome(lambda text: spec.parse_count("workers", text, 0, 512), word)
    assert isinstance(number, UsageError) or 0 <= number < float("inf")
    for unnamed in (Request(preset=word), Request(script=word)):
        spec.check_run_name(unnamed.run_name())
    for use in (lambda: check_script(f"{word}/nowhere.py", folders.runs_dir()), lambda: spec.build(1).task(word + "?")):
        with pytest.raises(UsageError) as error:
            use()
        assert str(error.value).isprintable()


@unhurried
@given(ANY)
def test_whatever_an_error_quotes_it_is_one_harmless_line(text):
    def body(c: Context) -> None:
        raise UsageError(text)

    with pytest.raises(Exit) as ended:
        report_errors(body)(Context())
    assert str(ended.value.message).isprintable()


def words_of(command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the words that a shell makes of a command."""
    variables, words = {}, shlex.split(command)
    while words and re.match(r"[A-Za-z_]+=", words[0]):
        name, _, variables_value = words.pop(0).partition("=")
        variables[name] = variables_value
    return variables, words


@pytest.fixture
def script(tmp_path) -> Path:
    folder = tmp_path / "their $HOME; `id`"
    folder.mkdir()
    (folder / "fit it.py").touch()
    return folder / "fit it.py"


@unhurried
@given(arguments=st.lists(TEXT, max_size=4), data=FILE)
def test_a_dry_run_s_commands_are_the_words_that_were_meant(script, monkeypatch, tmp_path, arguments, data):
    monkeypatch.setenv("DATA_DIR", str(tmp_path / data))
    requested = Request(script=str(script), overrides=arguments, runtime="local", workers=1, name="one")
    for line in startup.list_commands(planning.plan(requested)):
        variables, words = words_of(line)
        assert [sys.executable, "-m", "cluster.agent", "--script", str(script), *arguments, "&"] == words
        assert (str(tmp_path / data), str(tmp_path / "runs" / "one")) == (variables["DATA_DIR"], variables["RUN_DIR"])
        assert {"worker"} == set(json.loads(variables["TF_CONFIG"])["cluster"])


@unhurried
@given(folder=FILE, name=TEXT, path=st.lists(FILE, max_size=2))
def test_commands_on_folders_and_datasets_are_the_words_that_were_meant(folder, name, path):
    overlay = Path("/runs") / folder / "compose.json"
    words = words_of(compose_runtime.overlay_command(overlay, "up", "chief", "worker-0"))[1]
    assert str(overlay) in words
    assert ["chief", "worker-0"] == words[-2:]
    variables, words = words_of(tensorboard.compose_command(Path("/") / folder, 6006, "up"))
    assert (f"/{folder}", ["docker", "compose"]) == (variables["RUNS_DIR"], words[:2])
    variables, words = words_of(startup.data_command("prepare", name, variables=startup.user_variables(path)))
    assert ["--name", name] == words[4:6]
    assert os.pathsep.join(path) == variables.get("PYTHONPATH", "")


@pytest.mark.slow
@unhurried
@given(base=TEXT, folder=FILE)
@example(base="x", folder="a,type=env,b")
@example(base="x", folder='a"b,c')
def test_an_image_s_build_is_the_words_that_were_meant(tmp_path, monkeypatch, base, folder):
    bundle = tmp_path / folder[:20]
    bundle.touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    words = shlex.split(images.build_command("train", "cpu", images.Base(base), "--tag=x"))
    bundle.unlink()
    assert f"--build-arg=BASE_IMAGE={base}" in words
    (secret,) = [word.removeprefix("--secret=") for word in words if word.startswith("--secret=")]
    assert [["id=ca", f"src={bundle}"]] == [*csv.reader(io.StringIO(secret, newline=""))]


@pytest.mark.parametrize("pid", ["1; id", "$(id)", None, [1]])
def test_a_process_id_that_a_task_made_up_reaches_no_command(make_run, monkeypatch, pid):
    run, requested = make_run(), []
    monkeypatch.setattr(ContainerFaults, "_container", lambda self, task: "c")
    monkeypatch.setattr(engine, "ask", lambda *words, **options: requested.append(words))
    write_json(run.programs("chief"), {"program": {"pid": pid}})
    with pytest.raises(UsageError):
        ContainerFaults(run).signal("chief", 9, "program")
    assert [] == requested


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (text for part in value.values() for text in strings(part))
    elif isinstance(value, list):
        yield from (text for part in value for text in strings(part))
    elif isinstance(value, str):
        yield value


@unhurried
@given(
    folder=FILE,
    data=FILE,
    value=TEXT.filter(lambda text: "\0" not in text),
    arguments=st.lists(TEXT, max_size=3),
    gpu=TEXT,
)
def test_an_overlay_holds_what_was_meant_and_no_variable(folder, data, value, arguments, gpu):
    work = workload(
        RunFolder(Path("/runs") / folder),
        cluster=spec.build(0),
        data_dir=Path("/") / data,
        payload=Payload(Path("/theirs/train.py"), tuple(arguments), (Path("/") / data,), env=(f"X={value}",)),
        gpus=Placement({"chief": (gpu,)}),
    )
    read = json.loads(json.dumps(compose_runtime.render_overlay(work)))
    assert all("$" not in text.replace("$$", "") for text in strings(read))
    chief = read["services"]["chief"]
    meant = {key: [text.replace("$$", "$") for text in strings(chief.get(key, []))] for key in ("command", "volumes")}
    assert ["--script", "/script/train.py", *arguments] == meant["command"]
    assert {f"/runs/{folder}", f"/{data}", f"/runs/.scratch/{folder}"} <= set(meant["volumes"])
    assert value == chief["environment"]["X"].replace("$$", "$")
    (device,) = chief["deploy"]["resources"]["reservations"]["devices"]
    assert [gpu] == [text.replace("$$", "$") for text in device["device_ids"]]
    keys = {"extends", "image", "hostname", "user", "environment", "volumes", "labels", "networks", "command"}
    keys |= {"mem_limit", "memswap_limit", "deploy", "shm_size", "ulimits"}
    assert set(chief) <= keys  # no word becomes another key


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(TEXT, inside, max_size=3),
    max_leaves=6,
)
LIKE_ONE = st.fixed_dictionaries(
    {
        "cluster": st.dictionaries(
            st.sampled_from(["chief", "worker"]) | TEXT, st.lists(TEXT | JSON, max_size=2) | JSON
        ),
        "task": st.fixed_dictionaries({"type": st.sampled_from(["chief", "worker"]) | JSON, "index": JSON}),
    }
)


@unhurried
@given(ANY | JSON.map(json.dumps) | LIKE_ONE.map(json.dumps))
@example("[" * 100_000)
@example('{"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": Infinity}}')
@example('{"cluster": {"chief": ["a\\n:1"]}, "task": {"type": "chief", "index": 0}}')
@example('{"cluster": {"chief": ["a b:1"]}, "task": {"type": "chief", "index": 0}}')
@example('{"cluster": {"chief": ["a: 1"]}, "task": {"type": "chief", "index": 0}}')
@example('{"cluster": {"chief": ["a:1"], "x\\n": []}, "task": {"type": "chief", "index": 0}}')
def test_tf_config_is_one_or_refused_in_one_line(text):
    taken = outcome(tf_config.parse, text)
    if isinstance(taken, UsageError):
        assert len(str(taken)) < 1500
    else:
        cluster, _, _ = taken
        addresses = [address for addresses in cluster.values() for address in addresses]
        assert all(re.fullmatch(r"[A-Za-z0-9_.:\[\]-]+:[0-9]+", address) for address in addresses)
        assert all(re.fullmatch(r"\w+", role) for role in cluster)


SECRET = "hunter2-do-not-tell"


@pytest.mark.parametrize("runtime", ["local", "docker"])
@pytest.mark.parametrize("scripted", [False, True])
def test_no_file_plan_label_or_command_of_a_run_holds_a_secret(
    resolved, script, monkeypatch, runtime, scripted, tmp_path
):
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "DATABASE_PASSWORD"):
        monkeypatch.setenv(name, SECRET)
    for name in ("HTTPS_PROXY", "http_proxy"):
        monkeypatch.setenv(name, f"http://user:{SECRET}@proxy:3128")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0")
    monkeypatch.setattr(supervisor, "start_supervisor", lambda run: None)
    monkeypatch.setattr(registry, "choose_runtime", lambda *_: (registry.get_runtime(runtime), "requested"))
    monkeypatch.setattr(engine, "ask", lambda *words, **options: (1, ""))
    monkeypatch.setattr(images, "inspect_image", lambda image: {"image": image, "id": "sha256:1"})
    monkeypatch.setattr(images, "default_base", lambda commands_given="": images.Base("base"))
    for folder in (tmp_path, script.parent):
        folder.chmod(0o755)
    script.chmod(0o644)
    key = tmp_path / "key"
    key.write_text(SECRET)
    key.chmod(0o644)
    commands_given = Request(
        script=str(script) if scripted else "", name="one", workers=1, tensorboard_port="6006",
        secret=(f"WANDB_API_KEY={key}",),
    )  # fmt: skip
    monkeypatch.setattr(startup, "check_machine", lambda plan: None)
    planned, ran = planning.plan(commands_given), []
    startup.start(planned, ran.append, began=time.time())
    assert SECRET not in json.dumps(planned.to_json())
    assert not [command for command in (*ran, *startup.list_commands(planned)) if SECRET in command]
    written = [path for path in folders.runs_dir().rglob("*") if path.is_file() and not path.is_symlink()]
    assert {"compose.json", "manifest.json", "config.json", "cluster.json"} <= {path.name for path in written}
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    if runtime == "docker" and scripted:  # by its name alone
        assert None is planned.compose["services"]["chief"]["environment"]["HTTPS_PROXY"]
