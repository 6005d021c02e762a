"""The patch in docs/internals/upstream: its reproduction fails on the installed Keras and passes on a patched copy."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import fast
from tests.support.measured import ENVIRONMENT, HANG_S, ROOT

pytestmark = pytest.mark.needs("git")
UPSTREAM = ROOT / "docs" / "internals" / "upstream"
APPLY = "import keras\nfrom train import patches\nprint(keras.__file__, patches.apply(patches.FIT))\n"


def run(*command: str, path: Path | None = None) -> tuple[int, str]:
    """Return the exit code and the output of a Python that finds modules in `path` first."""
    environment = {**os.environ, **ENVIRONMENT} | ({"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"} if path else {})
    ended = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    return ended.returncode, ended.stdout


@pytest.fixture(scope="module")
def patched(tmp_path_factory) -> Path:
    """A folder with a patched copy of the installed Keras."""
    fast.leave_out("starts TensorFlow")
    folder, found = tmp_path_factory.mktemp("patched"), find_spec("keras")
    assert found is not None
    assert found.origin is not None
    shutil.copytree(Path(found.origin).parent, folder / "keras")
    apply = ["git", "apply", "-v", str(UPSTREAM / "keras-20585.patch")]
    subprocess.run(apply, cwd=folder, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}, check=True)
    return folder


@pytest.mark.long
def test_the_reproduction_must_fail_without_the_patch_and_pass_with_it(patched):
    code, printed = run(str(UPSTREAM / "keras-20585.py"))
    assert 1 == code
    assert "PerReplica" in printed
    code, printed = run(str(UPSTREAM / "keras-20585.py"), path=patched)
    assert 0 == code, printed
    first, second = printed.splitlines()
    assert "['loss', 'mae', 'val_loss', 'val_mae']" in first
    assert first == second  # one step at a time and two


@pytest.mark.extended
def test_no_patch_must_be_applied_to_a_fixed_keras(patched):
    code, printed = run("-c", APPLY, path=patched)
    assert (0, f"{patched / 'keras' / '__init__.py'} []\n") == (code, printed)
