"""What is said of an engine that cannot be asked."""

import pytest

from cluster.host.image import engine
from cluster.host.runtime import registry
from cluster.system.errors import PrerequisiteError


@pytest.mark.parametrize(
    ("there", "message"), [(False, "docker is not installed"), (True, "docker may not be run by this")]
)
def test_without_a_docker_that_runs_local_processes_are_chosen(there, message, tmp_path, monkeypatch):
    if there:
        (tmp_path / "docker").write_text("")
        (tmp_path / "docker").chmod(0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    runtime, why = registry.choose("auto")
    assert registry.LOCAL is runtime
    assert message in why


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "echo 'permission denied while trying to connect to the daemon socket at unix:///x.sock' >&2; exit 1",
            "usermod -aG docker",
        ),
        ("echo 'Cannot connect to the Docker daemon at unix:///x.sock.' >&2; exit 1", "systemctl start docker"),
        ("printf '\\303\\050' >&2; exit 1", "install and start Docker"),
    ],
)
def test_what_to_do_follows_from_why_no_engine_can_be_used(docker, script, expected):
    docker(script)
    with pytest.raises(PrerequisiteError, match=expected):
        registry.choose("docker")
    with pytest.raises(PrerequisiteError, match=expected):
        engine.demand("image.build")


@pytest.mark.parametrize("advice", ["\n\nRun 'docker run --help' for more", "\nSee 'docker run --help'.", ""])
def test_what_went_wrong_is_what_is_reported_last(docker, advice):
    docker(f'printf %s "docker: no such device{advice}" >&2; exit 125')
    assert (125, "docker: no such device") == engine.ask("run")
