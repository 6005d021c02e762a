"""Run files: what `plan --write` writes is what `--file` reads, and a mistake is refused."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import documents
from cluster.host.options import run_file
from cluster.host.options.request import OPTIONS, Request
from cluster.system.errors import EXIT_USAGE, UsageError
from tests.support.command_line import invoke
from tests.tools import options_page

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
PATHS = st.text("abc /.é\"'#=\\", min_size=1).filter(lambda name: not name.startswith(("~", "/")) and name.strip("/."))


def values(name: str) -> st.SearchStrategy[Any]:
    option = OPTIONS[name]
    if option.is_path and option.types == (list,):
        return st.lists(PATHS.map(lambda path: f"A_KEY={path}"), min_size=1).map(tuple)
    if option.is_path:  # without a suffix, so for --init-from a run, or a path with a slash
        return PATHS
    if option.types == (bool,):
        return st.just(True)
    if option.types == (list,):
        return st.lists(TEXT, min_size=1).map(tuple)
    numbers = st.integers(0, 10**9)
    if option.types == (int,):
        return numbers
    return TEXT | numbers.map(str) if int in option.types else TEXT


def read(folder: Path, text: str) -> run_file.RunFile:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return run_file.read_run_file(str(path))


def absolute(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with the files that they name as a run file names them."""

    def full(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(f"A_KEY={full(each.removeprefix('A_KEY='))}" for each in value)
        return str(Path(value).absolute())

    return {name: full(value) if OPTIONS[name].names_path(str(value)) else value for name, value in options.items()}


@settings(deadline=None, max_examples=25)
@given(options=st.fixed_dictionaries({}, optional={name: values(name) for name in OPTIONS}))
def test_the_options_that_are_written_are_read_again(tmp_path_factory, options):
    folder = tmp_path_factory.getbasetemp()
    text = run_file.render_run_file(Request(**options), {}, folder)
    tomllib.loads(text)
    assert absolute(options) == absolute(dict(read(folder, text).options))


@settings(deadline=None, max_examples=60)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "epochs": st.floats(),
            "max_steps": st.none() | st.integers(),
            "deterministic": st.booleans(),
            "model": TEXT,
        },
    ),
    st.fixed_dictionaries({}, optional={"name": TEXT, "learning_rate": st.floats()}),
)
def test_the_overrides_that_are_written_are_read_again(tmp_path_factory, overrides, optimizer):
    config = {"loop": "custom"} | overrides | {"optimizer": {"momentum": 0.9} | optimizer}
    typed = [f"--{name}" for name in overrides] + [f"--optimizer.{name}=any" for name in optimizer]
    text = run_file.render_run_file(Request(overrides=typed), config, Path("/"))
    expected = overrides | {f"optimizer.{name}": value for name, value in optimizer.items()}
    words = {f"--{name.replace('_', '-')}={value}" for name, value in expected.items() if name != "deterministic"}
    if "deterministic" in expected:
        words.add("--deterministic" if expected["deterministic"] else "--no-deterministic")
    assert words == set(read(tmp_path_factory.getbasetemp(), text).train)


@pytest.mark.parametrize(("given", "is_path"), [("before", False), ("a/ckpt-4.index", True), ("w.npz", True)])
def test_first_weights_are_in_a_file_next_to_the_run_file_or_of_a_run(tmp_path, monkeypatch, given, is_path):
    monkeypatch.chdir(tmp_path)
    text = run_file.render_run_file(Request(init_from=str(tmp_path / given) if is_path else given), {}, tmp_path)
    assert f'init-from = "{given}"' in text
    assert (str(tmp_path / given) if is_path else given) == read(tmp_path, text).options["init_from"]


def test_a_script_s_arguments_are_written_and_the_command_line_replaces_them(tmp_path):
    request = Request(script=str(tmp_path / "fit.py"), overrides=("--lr", "0.1", 'a "b"'))
    written = read(tmp_path, run_file.render_run_file(request, {"script": "fit.py", "arguments": []}, tmp_path))
    assert (str(tmp_path / "fit.py"), ("--lr", "0.1", 'a "b"')) == (written.options["script"], written.args)
    assert ("--lr", "0.1", 'a "b"') == written.request({}, []).arguments
    assert ("1",) == written.request({}, ["1"]).arguments


def test_options_on_the_command_line_win(tmp_path):
    train = '[train]\nepochs = 2\npipeline.schedule = "1f1b"\npipeline.remat = "false"\nmemory-snapshots = false\n'
    file = read(tmp_path, f'workers = 3\nruntime = "local"\nenv = ["A=1"]\n{train}')
    request = file.request({"workers": 1, "env": ("A=2",), "schedule": "gpipe", "remat": True}, ["--epochs", "4"])
    assert (1, "local", ("A=2",)) == (request.workers, request.runtime, request.env)
    words, options = ("--epochs=2", "--pipeline.remat=false"), ["--pipeline.remat", "--no-memory-snapshots"]
    assert [*words, "--pipeline.schedule", "gpipe", *options, "--epochs", "4"] == request.training()
    alone = file.request({}, [])
    assert ("1f1b", True, words) == (alone.schedule, alone.no_memory_snapshots, alone.train)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("\nworkesr = 2\n", ["'workesr'", "'workers'"]),
        ("workers = '2'\n", ["workers", '"2"', "integer"]),
        ("workers = true\n", ["workers", "true", "integer"]),
        ("# it\nevaluator = 1\n", ["evaluator", "1", "boolean"]),
        ("gpus = [0, 1]\n", ["gpus", "[0, 1]", "integer or string"]),
        ("env = 'A=1'\n", ["env", '"A=1"', "array of strings"]),
        ("train = 1\n", ["train", "1", "table"]),
        ("loop = 'fit'\n[train]\nprecision = 'bf16'\n", ["'precision'", "above [train]"]),
        ("[train]\nepochs = [1]\n", ["epochs", "[1]", "number"]),
        ("[train.optimizer]\nname = 1979-05-27\n", ["optimizer.name", "1979-05-27", "string"]),
        ("workers = 2\nworkers = 3\n", ["line 2"]),
        ("workers\n", ["line 1"]),
        (f"workers = {'1' * 5000}\n", ["TOML"]),
    ],
)
def test_a_mistake_is_refused_with_its_file(tmp_path, text, named):
    with pytest.raises(UsageError) as refused:
        read(tmp_path, text)
    message = str(refused.value)
    assert EXIT_USAGE == refused.value.exit_code
    assert [] == [each for each in [*named, "run.toml"] if each not in message], message


def test_what_cannot_be_read_or_written_is_refused(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff")
    for name in ("absent.toml", "", "binary.toml"):
        with pytest.raises(UsageError, match="--file"):
            run_file.read_run_file(str(tmp_path / name))
    path = run_file.write_run_file(str(tmp_path / "run.toml"), Request(workers=3), {})
    assert {"workers": 3} == tomllib.loads(path.read_text())
    with pytest.raises(UsageError, match="exists"):
        run_file.write_run_file(str(path), Request(), {})


def test_a_command_ignores_the_machine_s_options_of_a_file_but_not_what_trains(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('workers = 1\ngpus = 2\nscript = ""\nreuse-data = true\n')
    assert {"workers": 1} == run_file.read_run_file(str(path), {"workers"}).options
    path.write_text('workers = 1\ninit-from = "pretrained"\n')
    with pytest.raises(UsageError, match="'init-from'"):
        run_file.read_run_file(str(path), {"workers"})


@pytest.mark.slow
def test_the_plan_of_a_written_file_is_the_plan_that_wrote_it(tmp_path, monkeypatch):
    monkeypatch.setenv("INVOKED_AS", "tf-cluster")
    (tmp_path / "neighbor.py").write_text("from train.presets.fashion_mnist import preset\n")
    (tmp_path / "run.toml").write_text("preset = 'neighbor:preset'\nworkers = 3\n")
    given = ["--name=one", "--workers=1", "--runtime=local", "--env=A=1", "--checkpoint-every=30s"]
    words = ["--tensorboard-port=0", "--", "--epochs", "1", "--optimizer.learning-rate", "1e-3", "--no-deterministic"]
    run_toml, written = (str(tmp_path / name) for name in ("run.toml", "written.toml"))
    first = invoke("plan", "--json", "--file", run_toml, "--write", written, *given, *words)
    again = invoke("plan", "--json", "--file", written)
    assert f": tf-cluster up --file {written}" in first.stderr
    plans = [json.loads(each.stdout) for each in (first, again)]
    assert "neighbor:preset" == plans[0]["config"]["preset"]
    for plan in plans:
        for task in [*plan["tasks"], *plan["compose"]["tasks"].values()]:  # free ports
            task.pop("address", None), task.pop("tf_config", None), task.pop("environment", None)
    assert plans[0] == plans[1]
    training = tomllib.loads(Path(written).read_text())["train"]
    assert {"epochs": 1.0, "deterministic": False, "optimizer": {"learning-rate": 0.001}} == training
    (tmp_path / "run.toml").write_text("[train]\nepoch = 1\n")
    refused = invoke("up", "--runtime=local", "--file", run_toml)
    assert (EXIT_USAGE, 1) == (refused.returncode, len(refused.stderr.splitlines()))
    assert "--epoch=1" in refused.stderr
    assert not (tmp_path / "runs").exists()


def test_the_documented_options_are_those_that_are_declared():
    assert options_page.tables() == documents.written(options_page.PAGE, options_page.BEGIN)
