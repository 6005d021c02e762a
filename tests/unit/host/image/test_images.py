"""The images' names, commands, base and reproduction. What they hold: `tests/e2e/test_image_contents.py`."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.host.cli.tasks import preparing
from cluster.host.image import checkout, engine, images
from cluster.host.image.engine import Availability
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREREQUISITE, EXIT_USAGE, PrerequisiteError, UsageError
from cluster.system.files import ROOT
from tests.support.command_line import refusal

DIGEST = "sha256:" + "a" * 64
BASE = images.Base(f"{images.PYTHON_BASE}@{DIGEST}", DIGEST)
LAYERS = ("sha256:" + "b" * 64,)
MADE_HERE = [[], LAYERS]
NO_REGISTRY = (1, "ERROR: failed to do request: no such host")


@pytest.fixture(autouse=True)
def no_base_image(monkeypatch):
    monkeypatch.delenv("BASE_IMAGE", raising=False)


def answering(local: dict[str, Any], registry: tuple[int, str] = NO_REGISTRY) -> Callable[..., tuple[int, str]]:
    """Return an engine that has these images (name: what it reports of them) and a registry that gives this answer."""

    def ask(*words: str, timeout_s: float = 0) -> tuple[int, str]:
        if words[0] == "buildx":
            assert timeout_s == images.REGISTRY_TIMEOUT_S
            return registry
        names = words[3:]
        if missing := [name for name in names if name not in local]:
            return 1, f"Error: No such image: {missing[0]}"
        return 0, "\n".join(json.dumps(local[name]) for name in names)

    return ask


def test_make_up_must_look_for_these_images_and_pass_its_options_on():
    # `--no-print-directory`: `make test`, which this may run under, would have it say where it is.
    words = ["make", "--no-print-directory", "--dry-run", "--always-make", "up", "UP=--workers 1"]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"docker image inspect {images.train_image('cpu')} {images.image_name('tensorboard')} " in shown
    assert shown.endswith("invoke up --workers 1\n")  # invoke refuses an option that is given twice


PULLED = [[f"python@{DIGEST}"], LAYERS]


@pytest.mark.parametrize(
    ("local", "registry", "expected"),
    [
        ({}, (0, DIGEST), BASE),  # pinned to its digest
        ({images.DEBIAN_BASE: MADE_HERE}, (0, DIGEST), images.Base(images.DEBIAN_BASE, layers=LAYERS)),
        (
            {images.DEBIAN_BASE: MADE_HERE, images.PYTHON_BASE: PULLED},
            NO_REGISTRY,
            images.Base(images.PYTHON_BASE, DIGEST, LAYERS),
        ),
    ],
)
def test_the_official_image_is_the_base_unless_there_is_one_on_the_engine(monkeypatch, local, registry, expected):
    monkeypatch.setattr(engine, "ask", answering(local, registry))
    assert expected == images.default_base()


def test_without_a_registry_a_base_must_be_made_or_the_fix_reported(monkeypatch):
    monkeypatch.setattr(engine, "ask", answering({}))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    base = images.default_base()
    assert base == images.Base(images.DEBIAN_BASE, missing=True)
    made = images.base_commands()
    assert made == images.build_commands("cpu", base)[: len(made)]
    assert not set(made) & set(images.build_commands("cpu", BASE))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(PrerequisiteError, match=r"no such host.*mmdebstrap.*install it, or set BASE_IMAGE"):
        images.default_base()


def test_an_image_asked_for_must_be_used_or_refused(monkeypatch):
    monkeypatch.setattr(engine, "ask", answering({"mine:1": MADE_HERE, "yours:1": MADE_HERE}))
    monkeypatch.setenv("BASE_IMAGE", "mine:1")
    assert images.default_base() == images.Base("mine:1", layers=LAYERS)
    assert images.default_base("yours:1") == images.Base("yours:1", layers=LAYERS)
    with pytest.raises(PrerequisiteError, match="theirs:1 is neither on this engine nor in a registry"):
        images.default_base("theirs:1")


def test_both_images_must_be_built_from_the_same_base():
    train, board = (shlex.split(command) for command in images.build_commands("gpu", BASE))
    assert {"--target=train", "--tag=tf-cluster/train:gpu", "--build-arg=ACCELERATOR=gpu"} <= set(train)
    assert {"--target=tensorboard", f"--tag={images.image_name('tensorboard')}"} <= set(board)
    for command in (train, board):
        assert {
            f"--build-arg=BASE_IMAGE={BASE.name}",
            f"--label=org.opencontainers.image.base.name={images.PYTHON_BASE}",
            f"--label=org.opencontainers.image.base.digest={DIGEST}",
        } <= set(command)


@pytest.mark.parametrize(("revision", "claimed"), [("c0ffee-dirty", True), ("", False)])
def test_every_date_and_revision_must_be_the_commit_s(monkeypatch, revision, claimed):
    monkeypatch.setattr(checkout, "revision", lambda: revision)
    monkeypatch.setattr(checkout, "commit_time_s", lambda: 86400)
    for command in images.build_commands("cpu", BASE):
        assert "--build-arg=SOURCE_DATE_EPOCH=86400" in command
        assert "image.created=1970-01-02T00:00:00+00:00" in command
        assert claimed is ("image.revision=c0ffee-dirty" in command)


def test_a_proxys_address_must_not_be_printed_and_a_ca_bundle_travel_as_a_secret(monkeypatch, tmp_path):
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@proxy")
    command = images.build_commands("cpu", BASE)[0]
    assert "--build-arg=HTTPS_PROXY" in shlex.split(command)
    assert "secret@proxy" not in command
    bundle = tmp_path / "ca.crt"
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    assert "--secret" not in images.build_commands("cpu", BASE)[0]
    bundle.write_text("a certificate")
    assert [f"--secret=id=ca,src={bundle}"] == re.findall(rf"\S*{bundle}", images.build_commands("cpu", BASE)[0])


def labels(base: images.Base, accelerator: str = "cpu") -> dict[str, dict[str, str]]:
    """Return the labels of the images that were built from a base, as an engine reports them."""
    built = [shlex.split(command) for command in images.build_commands(accelerator, base)]
    names = [next(word[6:] for word in words if word.startswith("--tag=")) for words in built]
    given = [dict(word[8:].split("=", 1) for word in words if word.startswith("--label=")) for words in built]
    return dict(zip(names, given, strict=True))


def test_images_of_the_same_inputs_need_no_build_and_no_registry(monkeypatch):
    built = answering(labels(BASE))

    def ask(*words: str, timeout_s: float = 0) -> tuple[int, str]:
        assert words[0] == "image", "the registry was asked"
        return built(*words)

    monkeypatch.setattr(engine, "ask", ask)
    assert images.are_current("cpu")
    assert [] == images.pending_commands("cpu")
    assert not images.are_current("gpu")
    monkeypatch.setattr(checkout, "revision", lambda: "c0ffee")
    assert not images.are_current("cpu")


MADE = images.Base(images.DEBIAN_BASE, layers=LAYERS)


@pytest.mark.parametrize(
    ("base", "requested", "there", "current"),
    [
        (BASE, images.PYTHON_BASE, {}, True),
        (BASE, f"{images.PYTHON_BASE}@{DIGEST}", {}, True),
        (BASE, f"{images.PYTHON_BASE}@sha256:{'c' * 64}", {}, False),
        (BASE, "mine:1", {}, False),
        (MADE, "", {images.DEBIAN_BASE: MADE_HERE}, True),
        (MADE, "", {images.DEBIAN_BASE: [[], ["sha256:another"]]}, False),
        (MADE, "", {}, False),
    ],
)
def test_another_base_must_be_built(monkeypatch, base, requested, there, current):
    monkeypatch.setattr(engine, "ask", answering(labels(base) | there))
    if requested:
        monkeypatch.setenv("BASE_IMAGE", requested)
    assert current is images.are_current("cpu")


CHANGES: list[tuple[Callable[[Path], object], bool]] = [
    (lambda root: (root / "train" / "new.py").write_text(""), True),
    (lambda root: (root / "train" / "data" / "feeds.py").unlink(), True),
    (lambda root: (root / "cluster" / "contract" / "spec.py").write_text("import os"), True),
    (lambda root: (root / "docker" / "Dockerfile").write_text("FROM scratch"), True),
    (lambda root: (root / "docker" / "fill-root.sh").chmod(0o700), True),
    (lambda root: (root / "requirements" / "tensorboard.lock").write_text(""), True),
    (lambda root: (root / "requirements" / "tensorboard.in").write_text(""), False),
    (lambda root: (root / "train" / "__pycache__" / "new.pyc").write_text(""), False),
]


def test_what_an_image_is_made_of_must_decide_whether_it_is_built(tmp_path, monkeypatch):
    for name in ("docker", "requirements", "cluster", "train", ".dockerignore"):
        there = ROOT / name
        (shutil.copytree if there.is_dir() else shutil.copy)(there, tmp_path / name)
    monkeypatch.setattr(images, "ROOT", tmp_path)
    (tmp_path / "train" / "__pycache__").mkdir(exist_ok=True)
    monkeypatch.setattr(engine, "ask", answering(labels(BASE) | {images.PYTHON_BASE: PULLED}))
    assert images.are_current("cpu")
    before = images.inputs_sha256(BASE)
    for umask in (0o077, 0o002, 0o022):  # a clone's umask does not decide
        for path in tmp_path.rglob("*"):
            path.chmod((0o777 if path.is_dir() or path.stat().st_mode & 0o100 else 0o666) & ~umask)
        assert before == images.inputs_sha256(BASE)
    for change, builds in CHANGES:
        before = images.inputs_sha256(BASE)
        change(tmp_path)
        assert builds is (before != images.inputs_sha256(BASE))
    assert not images.are_current("cpu")
    assert images.pending_commands("cpu")


def test_every_install_must_be_from_a_lock_alone():
    for text in ((ROOT / "docker" / "fill-venv.sh").read_text(), (ROOT / "Makefile").read_text()):
        installs = re.findall(r"\bpip\b.* install ((?:.*\\\n)*.*)", text)
        assert 1 == len(installs)
        assert {"--require-hashes", "--no-deps", "--use-pep517", "--no-build-isolation"} <= set(installs[0].split())


@pytest.mark.parametrize("base", ["--help", "-", "a b", "$(id)", "a\nb"])
def test_an_invalid_name_of_a_base_is_refused_before_docker_is_called(base, docker, monkeypatch):
    calls = docker("exit 0")
    monkeypatch.setenv("BASE_IMAGE", base)
    for requested in ("", base):
        with pytest.raises(UsageError) as refused:
            images.default_base(requested)
        assert repr(base) in str(refused.value)
    assert "" == calls.read_text()


FIRST, CHANGED = (["1", "2"], {"User": "1"}, "today"), (["1", "3", "4"], {"User": "1"}, "today")


@pytest.fixture
def built(monkeypatch) -> list[Any]:
    """Layers, configuration and date of each image that the engine is asked for; none: there is no such image."""
    answers: list[Any] = []

    def ask(*words: str, timeout_s: float = 0) -> tuple[int, str]:
        if "RepoDigests" in words[2]:
            return 0, "[[], []]"  # of the base
        return (0, json.dumps(answers.pop(0))) if answers else (1, "No such image")

    monkeypatch.setattr(engine, "probe", lambda **_: Availability(True, "Docker Engine 0"))
    monkeypatch.setattr(engine, "ask", ask)
    return answers


def test_two_builds_must_be_from_nothing_and_leave_nothing(built):
    built += [FIRST, FIRST]
    commands: list[str] = []
    assert images.reproduce_image("train", "cpu", "", commands.append).lines()[0].startswith("identical: ")
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


def test_nothing_must_be_built_without_an_image_to_compare_with_and_a_build_that_has_none_leave_no_tag(built):
    with pytest.raises(UsageError, match="--against 'nothing:1' is not an image on this engine"):
        images.reproduce_image("train", "cpu", "nothing:1", pytest.fail)
    commands: list[str] = []
    with pytest.raises(UsageError):
        images.reproduce_image("tensorboard", "cpu", "", commands.append)
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
