"""The locks: complete, hashed, equal to each other, and equal to what is installed here."""

import importlib.metadata
import re
import sys

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cluster.host.image import locks
from cluster.system.files import ROOT

FOLDER = ROOT / locks.DIRECTORY
LINE = re.compile(
    r"""(?x)
    \#.* | \ +\#\ via\ .*                    # who asked for it
    | [\w.-]+==[\w.]+ (\ ;\ [^\\]+)?\ \\     # a package, going on with its hashes
    | \ {4}--hash=sha256:[0-9a-f]{64} (\ \\)?
    """
)


def lines(target: str) -> list[str]:
    return (FOLDER / f"{target}.lock").read_text().splitlines()


def requirements(target: str) -> list[Requirement]:
    entries = [line.partition("#")[0] for line in (FOLDER / f"{target}.in").read_text().splitlines()]
    return [Requirement(text) for text in entries if text.strip()]


def applies(marker: str, **environment: str) -> bool:
    return not marker or Marker(marker).evaluate(environment)


def unmet(target: str) -> set[tuple[str, str]]:
    """Return the requirements here of packages of a lock that it does not hold: of which package, and which."""
    locked = {pin.name for pin in locks.pins(target) if applies(pin.marker)}
    pending = [("", requested) for requested in requirements(target) if applies(str(requested.marker or ""))]
    seen, missing = set(), set()
    while pending:
        wanting, requested = pending.pop()
        name = canonicalize_name(requested.name)
        for extra in {"", *requested.extras} - {extra for known, extra in seen if known == name}:
            if name not in locked:
                missing.add((wanting, name))
                continue
            seen.add((name, extra))
            expected = map(Requirement, importlib.metadata.requires(name) or ())
            pending += [(name, each) for each in expected if not each.marker or each.marker.evaluate({"extra": extra})]
    return missing


@pytest.mark.parametrize("target", locks.TARGETS)
def test_a_lock_must_hold_every_package_that_is_asked_for_in_the_shared_version_and_hashed(target):
    assert [] == [line for line in lines(target) if not LINE.fullmatch(line)]
    following = dict(zip(lines(target), lines(target)[1:], strict=False))
    packages = [line for line in lines(target) if re.match(r"[\w.-]+==", line)]
    assert [] == [line for line in packages if "--hash=sha256:" not in following[line]]
    pins = locks.pins(target)
    assert len(packages) == len(pins) > 0
    assert {canonicalize_name(requested.name) for requested in requirements(target)} <= {pin.name for pin in pins}
    text = (ROOT / locks.CONSTRAINTS).read_text()
    shared = {line.split(" ; ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert set() == {f"{pin.name}=={pin.version}" for pin in pins} - shared


def test_both_accelerators_must_train_with_the_same_versions():
    cpu, gpu = ({(pin.name, pin.version) for pin in locks.pins(f"train-{name}")} for name in ("cpu", "gpu"))
    assert {"tensorflow-cpu"} == {name for name, _ in cpu - gpu}
    assert all(name.startswith("nvidia-") for name, _ in gpu - cpu)
    assert not {"tensorflow", "tensorflow-cpu", "keras"} & {pin.name for pin in locks.pins("tensorboard")}


@pytest.mark.parametrize(
    ("target", "machine", "tensorflow"),
    [("cpu", "x86_64", "tensorflow-cpu"), ("cpu", "aarch64", "tensorflow"), ("gpu", "x86_64", "tensorflow")],
)
def test_a_machine_must_get_one_tensorflow_with_its_legacy_keras(target, machine, tensorflow):
    expected = {pin.name for pin in locks.pins(f"train-{target}") if applies(pin.marker, platform_machine=machine)}
    assert {tensorflow, "keras", "tf-keras"} == expected & {"tensorflow", "tensorflow-cpu", "keras", "tf-keras"}


def test_arm64_must_be_asked_for_nothing_that_has_no_wheel_there():
    """Compiled packages; of the others any wheel does. `docs/internals/verified.md` names how it was checked."""
    pins = [pin for target in ("host", "train-cpu", "tensorboard") for pin in locks.pins(target)]
    wanted = {pin.name for pin in pins if applies(pin.marker, platform_machine="aarch64")}
    assert set() == {"tensorboard-plugin-profile", "tensorflow-cpu", "xprof"} & wanted


XPROF = ("cheroot", "duckdb", "fire", "google-cloud-storage", "gviz-api", "ml-dtypes", "urllib3")
LEFT_OUT = {("tf-keras", "tensorflow"), ("fsspec", "gcsfs"), *(("xprof", name) for name in XPROF)}
"""requirements/uv.toml says why: tensorflow-cpu takes its place, and what only xprof's own command line uses."""


def test_what_has_no_wheel_must_be_built_with_the_locked_setuptools():
    (builder,) = locks.pins("build")
    for target in ("train-cpu", "train-gpu", "tensorboard"):  # so the images hold nothing that their lock does not
        assert builder in locks.pins(target)


@pytest.mark.parametrize(("python", "expected"), [("3.11", ["early", "any"]), ("3.13", ["late", "any"])])
def test_a_pin_applies_to_the_versions_of_python_that_its_marker_names(python, expected):
    pins = [
        locks.Pin("early", "1", "python_full_version < '3.12' and sys_platform == 'linux'"),
        locks.Pin("late", "1", "python_full_version >= '3.12'"),
        locks.Pin("elsewhere", "1", "sys_platform == 'win32'"),
        locks.Pin("any", "1", ""),
    ]
    assert expected == [pin.name for pin in pins if pin.applies(python)]
    assert ("early" if sys.version_info < (3, 12) else "late") in [pin.name for pin in pins if pin.applies()]


@pytest.mark.parametrize("target", ["build", "host", "train-cpu", "tensorboard", "dev"])
def test_the_environment_must_be_as_locked_and_lack_nothing(target):
    assert set() == unmet(target) - LEFT_OUT  # installs look up no dependencies
    expected = {pin.name: pin.version for pin in locks.pins(target) if applies(pin.marker)}
    installed = {canonicalize_name(each.name): each.version for each in importlib.metadata.distributions()}
    assert expected == {name: installed.get(name) for name in expected}
