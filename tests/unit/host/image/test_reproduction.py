"""What an image holds, how two differ, and how that is reported: on small archives made here."""

import dataclasses
import json
import re
import shlex
import tarfile
from pathlib import Path
from typing import Any

import pytest

from cluster.host.cli.tasks import preparation
from cluster.host.image import contents, engine, images, reproduction
from cluster.host.image.engine import Answer
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREREQUISITE, EXIT_USAGE, UsageError
from tests.support.command_line import refusal
from tests.support.saved_image import Layer, archive, packed

NAMES = ("one", "other")
ENTRIES: dict[str, dict[str, Any]] = {
    "opt": {"type": tarfile.DIRTYPE, "mode": 0o755},
    "opt/a": {"data": b"aaa"},
    "opt/b": {"data": b"bbb"},
    "opt/link": {"type": tarfile.SYMTYPE, "linkname": "a"},
    "opt/same": {"type": tarfile.LNKTYPE, "linkname": "opt/a"},
}
CODE: dict[str, dict[str, Any]] = {"app": {"type": tarfile.DIRTYPE, "mode": 0o755}, "app/code.py": {"data": b"pass"}}


def differences(tmp_path: Path, *layers: list[Layer]) -> list[str]:
    first, second = (contents.read(archive(tmp_path / f"{number}.tar", each)) for number, each in enumerate(layers))
    return [str(each) for each in contents.compare(first, second, NAMES)]


def with_(path: str, **changed: Any) -> list[Layer]:
    return [{**ENTRIES, path: {**ENTRIES[path], **changed}}, CODE]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (with_("opt/b", data=b"ccc"), r"layer 1  /opt/b: content [0-9a-f]{12} and [0-9a-f]{12}"),
        (with_("opt/b", mtime=1795270788), "layer 1  /opt/b: mtime 0 and 1795270788"),
        (with_("opt/b", mode=0o755), "layer 1  /opt/b: mode 0644 and 0755"),
        (with_("opt/b", uid=7, gid=8), "layer 1  /opt/b: owner 0:0 and 7:8"),
        (with_("opt/link", linkname="b"), "layer 1  /opt/link: link a and b"),
        (with_("opt/same", linkname="opt/b"), "layer 1  /opt/same: link opt/a and opt/b"),
        (with_("opt/link", type=tarfile.LNKTYPE), "layer 1  /opt/link: type symbolic link and hard link"),
        (with_("opt/b", mode=0o600, mtime=5), "layer 1  /opt/b: mode 0644 and 0600, mtime 0 and 5"),
        (
            with_("opt/b", pax_headers={"SCHILY.xattr.user.x": "1"}),
            r"layer 1  /opt/b: attributes none and {.SCHILY.xattr.user.x.: .1.}",
        ),
        ([{**ENTRIES, "opt/c": {}}, CODE], "layer 1  /opt/c: only in other"),
        ([{k: v for k, v in ENTRIES.items() if k != "opt/b"}, CODE], "layer 1  /opt/b: only in one"),
        ([dict(sorted(ENTRIES.items(), reverse=True)), CODE], "layer 1: the same files in another order"),
        ([CODE, ENTRIES], "layers: the same in another order: those of one are 2, 1 of other"),
        ([ENTRIES], "layer 2: only in one, 2 entries"),
        (with_("opt/b", uname="root"), "layer 1: the same files, packed differently: sha256:.* and sha256:.*"),
    ],
)
def test_a_difference_must_be_named(tmp_path, changed, message):
    (found,) = differences(tmp_path, [ENTRIES, CODE], changed)
    assert re.fullmatch(message, found), found


def test_settings_must_be_compared_and_files_must_come_before_the_history(tmp_path):
    first = contents.read(archive(tmp_path / "1.tar", [ENTRIES], {"org.x": "a"}))
    second = contents.read(archive(tmp_path / "2.tar", with_("opt/b", mtime=5)[:1], {"org.x": "b"}))
    second.config["history"][0]["created"] = "later"
    differences = [each.what for each in contents.compare(first, second, NAMES)]
    assert ["config.Labels.org.x", "/opt/b", "history.0.created"] == differences


def test_images_with_two_ids_must_not_pass_for_identical(tmp_path):
    image = contents.read(archive(tmp_path / "x.tar", [ENTRIES]))
    (found,) = contents.compare(image, dataclasses.replace(image, id="sha256:other"), NAMES)
    assert f"configuration: the same, written differently: {image.id} and sha256:other" == str(found)


def test_a_packed_layer_must_read_as_an_unpacked_one(tmp_path):
    plain, gzipped = (
        contents.read(archive(tmp_path / f"{mode[-2:]}.tar", [ENTRIES], mode=mode)) for mode in ("w", "w:gz")
    )
    assert [] == contents.compare(plain, gzipped, NAMES)
    assert 4 == plain.num_files


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no tar",
        packed({"x": {"data": b"y"}}),
        packed({"manifest.json": {}}),
        packed({"manifest.json": {"data": b"[{}, {}]"}}),  # of several images
        None,  # cut short
    ],
)
def test_what_is_no_image_must_be_refused(tmp_path, content):
    path = archive(tmp_path / "x.tar", [ENTRIES, CODE])
    path.write_bytes(path.read_bytes()[:3000] if content is None else content)
    with pytest.raises(UsageError, match=r"x\.tar"):
        contents.read(path)


# The task


@pytest.fixture
def engine_ready(monkeypatch):
    monkeypatch.setattr(engine, "probe", lambda: Answer(True, "Docker Engine 0"))
    monkeypatch.setattr(
        engine, "ask", lambda *words, **_: (0, "[[], []]") if words[-1] != "nothing:1" else (1, "No such")
    )


class Shell:
    """Remembers commands; a save writes the next of the given images."""

    def __init__(self, *builds: list[Layer]) -> None:
        self.builds = list(builds)
        self.commands: list[str] = []

    def __call__(self, command: str) -> None:
        self.commands.append(command)
        if path := output(command):
            archive(path, self.builds.pop(0))


def output(command: str) -> Path | None:
    """Return the archive that a command saves an image to; None for any other command."""
    words = shlex.split(command)
    if words[:3] != ["docker", "image", "save"]:
        return None
    return next(Path(word.removeprefix("--output=")) for word in words if word.startswith("--output="))


@pytest.mark.usefixtures("engine_ready")
def test_two_builds_must_be_from_nothing_and_leave_nothing():
    sh = Shell([ENTRIES], [ENTRIES])
    verdict = reproduction.examine("train", "cpu", "", sh)
    assert verdict.identical
    builds, saves, removals = (
        [each for each in sh.commands if each.startswith(f"docker {verb} ")]
        for verb in ("build", "image save", "image rm")
    )
    assert 2 == len(builds) == len(saves) == len(removals) == len(sh.commands) / 3
    tags = [re.findall(r"--tag=(\S+)", each) for each in builds]
    assert all("--no-cache" in each for each in builds)
    assert [each.split()[-1:] for each in removals] == tags
    assert not {images.train_image("cpu"), images.tensorboard_image()} & {tag for (tag,) in tags}
    assert not [path for each in saves if (path := output(each)) and path.parent.exists()]


@pytest.mark.usefixtures("engine_ready")
def test_a_failed_save_must_leave_no_tag():
    class Full(Shell):
        def __call__(self, command: str) -> None:
            self.commands.append(command)
            if output(command):
                raise OSError("disk full")

    sh = Full()
    with pytest.raises(OSError, match="disk full"):
        reproduction.examine("tensorboard", "cpu", "", sh)
    assert sh.commands[-1].startswith("docker image rm tf-cluster/reproduction:")


@pytest.mark.usefixtures("engine_ready")
@pytest.mark.parametrize("kind", ["archive", "image"])
def test_a_build_must_be_compared_with_what_is_there(tmp_path, kind):
    path = archive(tmp_path / "theirs.tar", [ENTRIES])
    changed = with_("opt/b", mtime=5)[:1]
    sh = Shell(changed) if kind == "archive" else Shell([ENTRIES], changed)
    verdict = reproduction.examine("train", "cpu", str(path) if kind == "archive" else "theirs:1", sh)
    assert 1 == sum(each.startswith("docker build ") for each in sh.commands)
    assert "layer 1  /opt/b: mtime 5 and 0" in verdict.lines()


@pytest.mark.usefixtures("engine_ready")
def test_nothing_must_be_built_where_there_is_nothing_to_compare_with(tmp_path):
    (tmp_path / "broken.tar").write_text("broken")
    for against, message in (
        ("nothing:1", "neither an archive.* nor an image"),
        (f"{tmp_path}/broken.tar", "not an im"),
    ):
        sh = Shell()
        with pytest.raises(UsageError, match=message):
            reproduction.examine("train", "cpu", against, sh)
        assert [] == sh.commands


def run(monkeypatch: pytest.MonkeyPatch, second: list[Layer], **options: Any) -> int:
    monkeypatch.setattr(preparation, "shell", lambda c, **_: Shell([ENTRIES], second))
    return refusal("image.reproduce", **options)[0]


@pytest.mark.usefixtures("engine_ready")
def test_the_exit_code_must_report_whether_they_are_identical(monkeypatch, capsys):
    assert EXIT_DONE == run(monkeypatch, [ENTRIES])
    assert capsys.readouterr().out.startswith("identical: ")
    assert EXIT_FAILED == run(monkeypatch, [CODE], json=True)
    (value,) = json.loads(capsys.readouterr().out)
    assert ("tf-cluster/train:cpu", False) == (value["image"], value["identical"])


@pytest.mark.parametrize(
    ("task", "options", "named"),
    [
        ("image.reproduce", {"image": "trian"}, "'train'"),
        ("image.reproduce", {"accelerator": "tpu"}, "'tpu'"),
        ("image.reproduce", {"image": "both", "against": "x"}, "--against 'x'"),
        ("image.sbom", {"image": "both"}, "both"),
        ("image.sbom", {"accelerator": "tpu"}, "tpu"),
        ("image.sbom", {"output": "/"}, "/"),
        ("image.sbom", {"output": "/nowhere/x"}, "/nowhere/x"),
        ("image.build", {"accelerator": "xyz"}, "xyz"),
    ],
)
def test_wrong_words_must_be_refused_before_any_engine_is_asked(monkeypatch, task, options, named):
    monkeypatch.setattr(engine, "ask", lambda *words, **_: pytest.fail(f"asked: docker {words}"))
    code, message = refusal(task, **options)
    assert (EXIT_USAGE, 1) == (code, len(message.splitlines()))
    assert named in message


@pytest.mark.parametrize("task", ["image.reproduce", "image.sbom"])
def test_without_an_engine_the_prerequisite_must_be_reported(monkeypatch, tmp_path, task):
    monkeypatch.setattr(engine, "ask", lambda *words, **_: (127, "docker is not installed"))
    options = {"output": str(tmp_path / "x")} if task == "image.sbom" else {}
    code, message = refusal(task, **options)
    assert (EXIT_PREREQUISITE, 1) == (code, len(message.splitlines()))
    assert "docker is not installed" in message
