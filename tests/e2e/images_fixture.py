"""The images of this checkout, built once for all tests that run containers."""

from __future__ import annotations

import subprocess

import pytest

from cluster import images as recipe


@pytest.fixture(scope="session")
def images() -> None:
    """Build the cpu image and the TensorBoard image; with nothing changed since the last time it takes a second."""
    for command in recipe.build_commands("cpu", recipe.default_base()):
        done = subprocess.run(command, shell=True, cwd=recipe.ROOT, capture_output=True, text=True, check=False)
        assert 0 == done.returncode, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
