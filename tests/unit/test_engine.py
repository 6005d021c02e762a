"""What is said of an engine that cannot be asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import engine


@pytest.mark.parametrize(
    ("there", "told"), [(False, "docker is not installed"), (True, "docker may not be run by this")]
)
def test_without_a_docker_that_runs_local_processes_are_chosen(
    there: bool, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        (tmp_path / "docker").write_text("")
        (tmp_path / "docker").chmod(0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    runtime, why = engine.choose_runtime("auto")
    assert "local" == runtime
    assert told in why


@pytest.mark.parametrize("advice", ["\n\nRun 'docker run --help' for more", "\nSee 'docker run --help'.", ""])
def test_what_went_wrong_is_what_is_told_last(docker: Callable[[str], Path], advice: str) -> None:
    docker(f'printf %s "docker: no such device{advice}" >&2; exit 125')
    assert (125, "docker: no such device") == engine.ask("run")
