"""`invoke image.reproduce`: two builds from nothing, and whether they are the same bytes."""

import json
import re
from typing import Any

import pytest

from cluster.host.cli.tasks import preparing
from cluster.host.image import engine, images, reproduction
from cluster.host.image.engine import Availability
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREREQUISITE, EXIT_USAGE, UsageError
from tests.support.command_line import refusal

FIRST, CHANGED = (["1", "2"], {"User": "1"}, "today"), (["1", "3", "4"], {"User": "1"}, "today")


@pytest.fixture
def built(monkeypatch) -> list[Any]:
    """Layers, configuration and date of each image that the engine is asked for; none: there is no such image."""
    answers: list[Any] = []

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
    assert reproduction.reproduce_image("train", "cpu", "", commands.append).lines()[0].startswith("identical: ")
    builds, removals = (
        [each for each in commands if each.startswith(f"docker {verb} ")] for verb in ("build", "image rm")
    )
    assert 2 == len(builds) == len(removals) == len(commands) / 2
    tags = [re.findall(r"--tag=(\S+)", each) for each in builds]
    assert all("--no-cache" in each for each in builds)
    assert [each.split()[-1:] for each in removals] == tags
    assert not {images.train_image("cpu"), images.image_name("tensorboard")} & {tag for (tag,) in tags}


@pytest.mark.parametrize(
    ("other", "differing", "code"),
    [
        (FIRST, [], EXIT_DONE),
        (CHANGED, [2, 3], EXIT_FAILED),
        ((["1"], *FIRST[1:]), [2], EXIT_FAILED),
        ((FIRST[0], {"User": "2"}, "today"), [], EXIT_FAILED),
        ((*FIRST[:2], "yesterday"), [], EXIT_FAILED),
    ],
)
def test_a_difference_must_be_named_and_end_with_1(built, monkeypatch, capsys, other, differing, code):
    built += [other, FIRST]
    monkeypatch.setattr(preparing, "shell", lambda c, **_: lambda command: None)
    ended, _ = refusal("image.reproduce", against="theirs:1", json=True)
    (value,) = json.loads(capsys.readouterr().out)
    assert (code, differing, code == EXIT_DONE) == (ended, value["differing"], value["identical"])


def test_nothing_must_be_built_where_there_is_nothing_to_compare_with(built):
    with pytest.raises(UsageError, match="--against 'nothing:1' is not an image on this engine"):
        reproduction.reproduce_image("train", "cpu", "nothing:1", pytest.fail)


def test_a_build_that_cannot_be_examined_must_leave_no_tag(built):
    commands: list[str] = []
    with pytest.raises(UsageError):
        reproduction.reproduce_image("tensorboard", "cpu", "", commands.append)
    assert commands[-1].startswith("docker image rm tf-cluster/reproduction:")


@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        ({"image": "trian"}, "'train'", EXIT_USAGE),
        ({"accelerator": "tpu"}, "'tpu' has no image", EXIT_USAGE),
        ({"image": "both", "against": "x"}, "--against 'x'", EXIT_USAGE),
        ({}, "install and start Docker", EXIT_PREREQUISITE),
    ],
)
def test_what_cannot_be_built_must_be_refused_and_wrong_words_before_any_engine_is_asked(
    monkeypatch, options, message, code
):
    asked = []
    monkeypatch.setattr(engine, "ask", lambda *words, **_: asked.append(words) or (127, "docker is not installed"))
    ended, said = refusal("image.reproduce", **options)
    assert message in said
    assert (code, code == EXIT_PREREQUISITE) == (ended, bool(asked))
