"""The doctor: every check reports what it found, with a fix."""

import sys
from types import SimpleNamespace

import pytest

from cluster.host.checks import doctor
from cluster.host.image import engine
from cluster.host.image.engine import Availability
from cluster.host.runtime import namespaces, tensorboard
from cluster.host.runtime import resources as limits
from cluster.host.runtime.base import Finding
from cluster.host.runtime.namespaces import Refusal
from cluster.host.schedulers import slurm_runtime as slurm
from cluster.system.files import ROOT
from cluster.system.ports import free_ports


@pytest.fixture(autouse=True)
def healthy(monkeypatch, tmp_path):
    (tmp_path / "data" / "arrays" / "mnist-3.0.1").mkdir(parents=True)
    (tmp_path / "data" / "arrays" / "mnist-3.0.1" / "arrays.json").touch()
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(limits, "TASK_MEMORY_BYTES", 1)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=10 * 2**30))
    monkeypatch.setattr(engine, "probe", lambda: Availability(True, "Docker Engine 26.1.5, Compose 2.26.1"))
    monkeypatch.setattr(namespaces, "refusal", lambda: None)
    monkeypatch.setattr(doctor, "examine_gpus", lambda: [Finding("gpus", "ok", "none")])
    monkeypatch.setattr(slurm.Slurm, "examine", lambda self: [])


def examine() -> dict[str, Finding]:
    return {found.check: found for found in doctor.examine_machine(free_ports(1)[0])}


def test_a_machine_that_lacks_nothing_is_ok():
    found = examine()
    machine = ["python", "packages", "processor", "disk", "data", "tensorboard port"]
    assert [*machine, "docker", "memory", "task network", "gpus"] == list(found)
    assert {"ok"} == {finding.state for finding in found.values()}
    assert {""} == {finding.fix for finding in found.values()}
    assert "mnist-3.0.1" == found["data"].detail


@pytest.mark.parametrize(
    ("check", "state", "lack"),
    [
        ("python", "failed", lambda m: m.setattr(sys, "version_info", (3, 10, 1))),
        ("packages", "failed", lambda m: m.setattr(doctor, "locked", lambda: [("pytest", "0.1")])),
        ("packages", "failed", lambda m: m.setattr(doctor, "locked", lambda: [("no-such-package", "1")])),
        ("processor", "warning", lambda m: m.setattr(doctor.os, "sched_getaffinity", lambda pid: {0})),
        ("memory", "failed", lambda m: m.setattr(limits, "TASK_MEMORY_BYTES", 2**60)),
        ("disk", "failed", lambda m: m.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))),
        ("disk", "failed", lambda m: m.setattr(doctor.os, "access", lambda *_: False)),
        ("data", "warning", lambda m: m.setenv("DATA_DIR", "/nowhere")),
        ("tensorboard port", "warning", lambda m: m.setattr(tensorboard, "port_problem", lambda *_: "it is in use")),
        ("task network", "warning", lambda m: m.setattr(namespaces, "refusal", lambda: Refusal("it", "allow it"))),
        ("docker", "warning", lambda m: m.setattr(engine, "probe", lambda: engine.unavailable("it is absent"))),
    ],
)
def test_what_is_missing_is_reported_with_its_fix(monkeypatch, check, state, lack):
    lack(monkeypatch)
    found = examine()
    assert state == found[check].state
    assert found[check].fix
    assert {"ok"} == {finding.state for name, finding in found.items() if name != check}


@pytest.mark.parametrize(("states", "ok"), [(["ok", "warning"], True), (["ok", "failed", "warning"], False)])
def test_only_a_failed_check_makes_the_report_bad(states, ok):
    report = doctor.report([Finding("check", state, "found", "fix") for state in states])
    assert ok == report["ok"]
    assert {"check": "check", "state": "ok", "detail": "found", "fix": "fix"} == report["findings"][0]


def test_the_doctor_looks_at_what_make_setup_installs():
    names = " ".join(f"{lock}.lock" for lock in doctor.LOCKS).replace("-cpu", "-$(ACCELERATOR)")
    assert f"LOCKS := $(addprefix requirements/,{names})\n" in (ROOT / "Makefile").read_text()
