"""`invoke image.reproduce`: two builds from nothing, and whether they are the same bytes."""

import json
import re

import pytest
from invoke import Exit, MockContext

import tasks
from cluster.host.cli.tasks import preparing
from cluster.host.image import engine, images, reproduction
from cluster.host.image.engine import Availability
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREREQUISITE, EXIT_USAGE, UsageError

FIRST, CHANGED = (["1", "2"], {"User": "1"}, "today"), (["1", "3", "4"], {"User": "1"}, "today")

Image = tuple[list[str], dict[str, str], str]


@pytest.fixture
def built(monkeypatch) -> list[Image]:
    """Layers, configuration and date of each image that the engine is asked for; none: there is no such image."""
    answers: list[Image] = []

    def ask(*words: str, timeout_s: float = 0) -> tuple[int, str]:
        if "RepoDigests" in words[2]:
            return 0, "[[], []]"  # of the base
        return (0, json.dumps(answers.pop(0))) if answers else (1, "No such image")

    monkeypatch.setattr(engine, "probe", lambda: Availability(True, "Docker Engine 0"))
    monkeypatch.setattr(engine, "ask", ask)
    return answers


def test_two_builds_must_be_from_nothing_and_leave_nothing(built):
    built += [FIRST, FIRST]
    commands: list[str] = []
    assert reproduction.reproduce_image("train", "cpu", "", commands.append).identical
    builds, removals = (
        [each for each in commands if each.startswith(f"docker {verb} ")] for verb in ("build", "image rm")
    )
    assert 2 == len(builds) == len(removals) == len(commands) / 2
    tags = [re.findall(r"--tag=(\S+)", each) for each in builds]
    assert all("--no-cache" in each for each in builds)
    assert [each.split()[-1:] for each in removals] == tags
    assert not {images.train_image("cpu"), images.image_name("tensorboard")} & {tag for (tag,) in tags}


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (FIRST, ""),
        (CHANGED, "layer 2, 3"),
        ((["1"], *FIRST[1:]), "layer 2"),
        ((FIRST[0], {"User": "2"}, "today"), "the configuration"),
        ((*FIRST[:2], "yesterday"), "the configuration"),
    ],
)
def test_a_difference_must_be_named(built, other, what):
    built += [other, FIRST]
    verdict = reproduction.reproduce_image("train", "cpu", "theirs:1", lambda command: None)
    first = f"different: tf-cluster/train:cpu in {what}: a new build and theirs:1"
    assert (not what, what != "") == (verdict.identical, verdict.lines()[0] == first)


def test_nothing_must_be_built_where_there_is_nothing_to_compare_with(built):
    with pytest.raises(UsageError, match="--against 'nothing:1' is not an image on this engine"):
        reproduction.reproduce_image("train", "cpu", "nothing:1", pytest.fail)


def test_a_build_that_cannot_be_examined_must_leave_no_tag(built):
    commands: list[str] = []
    with pytest.raises(UsageError):
        reproduction.reproduce_image("tensorboard", "cpu", "", commands.append)
    assert commands[-1].startswith("docker image rm tf-cluster/reproduction:")


@pytest.mark.parametrize(("second", "code"), [(FIRST, EXIT_DONE), (CHANGED, EXIT_FAILED)])
def test_the_exit_code_must_report_whether_they_are_identical(built, monkeypatch, capsys, second, code):
    built += [FIRST, second]
    monkeypatch.setattr(preparing, "shell", lambda c, **_: lambda command: None)
    with pytest.raises(Exit) as ended:
        tasks.ns["image.reproduce"](MockContext(), json=True)
    (value,) = json.loads(capsys.readouterr().out)
    assert (code, code == EXIT_DONE) == (ended.value.code, value["identical"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": "trian"}, "'trian' is unknown; did you mean 'train'"),
        ({"accelerator": "tpu"}, "'tpu' has no image"),
        ({"image": "both", "against": "x"}, "--against 'x' is one image"),
    ],
)
def test_wrong_words_must_be_refused_before_any_engine_is_asked(monkeypatch, options, message):
    monkeypatch.setattr(engine, "ask", lambda *words, **_: pytest.fail(f"asked: docker {words}"))
    with pytest.raises(Exit, match=message) as ended:
        tasks.ns["image.reproduce"](MockContext(), **options)
    assert EXIT_USAGE == ended.value.code


def test_without_an_engine_the_prerequisite_must_be_reported(monkeypatch):
    monkeypatch.setattr(engine, "ask", lambda *words, **_: (127, "docker is not installed"))
    with pytest.raises(Exit, match="docker is not installed.*install and start Docker") as ended:
        tasks.ns["image.reproduce"](MockContext())
    assert EXIT_PREREQUISITE == ended.value.code
