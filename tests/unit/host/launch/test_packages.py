"""Extra packages: from a requirements file to a folder, without a network: the packages are made on the spot."""

import http.server
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from cluster.host.launch import user_files
from cluster.host.runtime import registry
from cluster.system.errors import PrerequisiteError, UsageError

PYTHON = registry.LOCAL.python


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """Packages come from the files that tests make, and are kept in the test's own folder."""
    monkeypatch.setattr(user_files, "PACKAGES", tmp_path / "kept")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.chdir(tmp_path)


def wheel(folder: Path, name: str, version: str = "1.0", needs: str = "", text: str = "X = 1\n") -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", text)
        file.writestr(f"{info}/METADATA", metadata + (f"Requires-Dist: {needs}\n" if needs else ""))
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


def requirements(folder: Path, *lines: object) -> Path:
    path = folder / "theirs.txt"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_packages_are_installed_once_with_what_they_need_and_are_readable(tmp_path, monkeypatch):
    wheel(tmp_path, "their_helper", text="Y = 2\n")
    requested = requirements(
        tmp_path, wheel(tmp_path, "their_package", needs="their_helper"), f"--find-links {tmp_path}"
    )
    old = os.umask(0o077)
    try:
        folder = user_files.install_packages(requested, PYTHON)
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o055 for path in (folder, *folder.rglob("*"))} <= {0o044, 0o055}
    assert {"their_package.py", "their_helper.py", user_files.RESOLVED} <= {path.name for path in folder.iterdir()}
    resolved = (folder / user_files.RESOLVED).read_text().splitlines()
    assert ["their-helper", "their-package"] == [line.split(" @ ")[0].replace("_", "-") for line in resolved]
    assert all(" --hash=sha256:" in line for line in resolved)
    code = "import their_package, their_helper; print(their_package.X + their_helper.Y)"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(folder)}, capture_output=True, text=True)
    assert "3" == done.stdout.strip(), done.stderr
    monkeypatch.setattr(user_files, "_run_pip", lambda *_: pytest.fail("installed again"))
    assert folder == user_files.install_packages(requested, PYTHON)
    assert [folder] == list(user_files.PACKAGES.iterdir())  # nothing half done is left


def source(folder: Path, *needs: str) -> Path:
    """Make a source distribution whose build leaves a file behind."""
    path, top = folder / "their_source-1.0.tar.gz", "their_source-1.0"
    files = {
        "setup.py": f"import pathlib\nfrom setuptools import setup\npathlib.Path({str(folder / 'ran')!r}).touch()\n"
        "setup(name='their_source', version='1.0', py_modules=['their_source'])\n",
        "their_source.py": "X = 3\n",
        "PKG-INFO": "Metadata-Version: 2.1\nName: their_source\nVersion: 1.0\n",
        "pyproject.toml": f"[build-system]\nrequires = {json.dumps(['setuptools', *needs])}\n"
        'build-backend = "setuptools.build_meta"\n',
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


def test_a_source_distribution_is_refused_and_not_run(tmp_path):
    source(tmp_path)
    with pytest.raises(UsageError, match="--no-binary"):
        user_files.install_packages(requirements(tmp_path, "their_source", f"--find-links {tmp_path}"), PYTHON)
    assert not (tmp_path / "ran").exists()


@pytest.mark.extended
@pytest.mark.parametrize("named", ["--no-binary their_source", "archive"])
def test_a_source_distribution_that_is_named_is_built_with_what_is_locked(tmp_path, named):
    archive = source(tmp_path, "a-build-dependency-that-nothing-may-fetch")
    line = str(archive) if named == "archive" else "their_source"
    option = f"--find-links {tmp_path}" + ("" if named == "archive" else f"\n{named}")
    folder = user_files.install_packages(requirements(tmp_path, line, option), PYTHON)
    assert "X = 3\n" == (folder / "their_source.py").read_text()


def test_what_our_own_lock_has_is_left_out(tmp_path):
    for pin in user_files.locks.pins("train-cpu"):
        if pin.name in ("numpy", "keras") and pin.applies():
            wheel(tmp_path, pin.name, pin.version)
    requested = requirements(tmp_path, "numpy", "keras", f"--find-links {tmp_path}")
    folder = user_files.install_packages(requested, PYTHON)
    assert [user_files.RESOLVED] == [path.name for path in folder.iterdir()]
    assert "" == (folder / user_files.RESOLVED).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("no-such-package-of-ours", "no-such-package-of-ours"),
        ("not a requirement", "'not a requirement'"),
        ("{folder}/tensorflow-2.15.0-py3-none-any.whl", "tasks have tensorflow=="),
        ("{folder}/theirs", "no hash"),
        (None, "No such file"),
    ],
)
def test_what_cannot_be_installed_is_refused_in_one_line(tmp_path, line, named):
    wheel(tmp_path, "tensorflow", "2.15.0")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "setup.py").write_text("from setuptools import setup\nsetup(name='theirs')\n")
    requested = requirements(tmp_path, line.format(folder=tmp_path)) if line else tmp_path / "absent.txt"
    with pytest.raises(UsageError, match=named) as refused:
        user_files.install_packages(requested, PYTHON)
    assert 1 == len(str(refused.value).splitlines())
    assert not user_files.PACKAGES.exists() or [] == list(user_files.PACKAGES.iterdir())


def test_an_index_that_cannot_be_reached_is_a_missing_prerequisite(tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(PrerequisiteError, match="PIP_INDEX_URL"):
        user_files.install_packages(requirements(tmp_path, "no-such-package-of-ours"), PYTHON)


class Login(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(401)


def test_an_index_that_wants_a_login_asks_nobody_for_it(tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Login) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        with pytest.raises(UsageError, match="login of a private index"):
            user_files.install_packages(requirements(tmp_path, "no-such-package-of-ours"), PYTHON)
        server.shutdown()


def test_the_folder_follows_from_all_that_counts(tmp_path):
    module = wheel(tmp_path, "their_package")
    requested = requirements(tmp_path, f"./{module.name}")
    first = user_files.locate_packages(requested, "3.11")
    assert first == user_files.locate_packages(requested, "3.11") != user_files.locate_packages(requested, "3.12")
    wheel(tmp_path, "their_package", text="X = 2\n")  # the same name, another content
    second = user_files.locate_packages(requested, "3.11")
    requirements(tmp_path, f"./{module.name}", "# more")
    assert 3 == len({first, second, user_files.locate_packages(requested, "3.11")})
