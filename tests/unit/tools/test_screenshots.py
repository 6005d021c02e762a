"""Pictures of what one looks at in a browser."""

from pathlib import Path

import pytest
from PIL import Image

from cluster.system.errors import PrerequisiteError, RunFailed
from tests.tools import screenshots


def browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> str:
    program = tmp_path / "chromium"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("CHROMIUM", str(program))
    return screenshots.browser()


def test_a_missing_browser_is_named_with_what_installs_one(monkeypatch, tmp_path):
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PrerequisiteError, match="chromium-headless-shell"):
        screenshots.browser()


def test_a_picture_has_few_colours(monkeypatch, tmp_path):
    taken = tmp_path / "taken.png"
    Image.effect_noise((300, 200), 100).convert("RGB").save(taken)
    words = f'for word; do case "$word" in --screenshot=*) cp {taken} "${{word#--screenshot=}}";; esac; done'
    program = browser(tmp_path, monkeypatch, words)
    path = screenshots._shoot(program, "file:///x", tmp_path / "shown.png", (300, 200), ())
    with Image.open(path) as picture:
        assert (300, 200) == picture.size
        assert len(picture.convert("RGB").getcolors(2**16)) <= screenshots.MAX_COLOURS


def test_a_browser_that_makes_no_picture_is_a_failure(monkeypatch, tmp_path):
    program = browser(tmp_path, monkeypatch, "echo cannot open display >&2; exit 1")
    with pytest.raises(RunFailed, match="cannot open display"):
        screenshots._shoot(program, "file:///x", tmp_path / "shown.png", (300, 200), ())
