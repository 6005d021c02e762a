"""What is said of an engine that cannot be asked."""

import pytest

from cluster.host.image import engine
from cluster.host.runtime import registry


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


@pytest.mark.parametrize("advice", ["\n\nRun 'docker run --help' for more", "\nSee 'docker run --help'.", ""])
def test_what_went_wrong_is_what_is_reported_last(docker, advice):
    docker(f'printf %s "docker: no such device{advice}" >&2; exit 125')
    assert (125, "docker: no such device") == engine.ask("run")
