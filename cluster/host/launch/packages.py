"""Extra packages for the user's code: `--requirements FILE` -> a folder for PYTHONPATH, created once and cached.

Neither .venv nor the image changes: their packages stay as locked, and only additional packages are installed, into
`.build/packages/`, each file checked against the hash from its resolution. Only wheels are used, so that nothing is
built with unpinned packages; a package that the file names with `--no-binary`, or as an archive, is built with the
locked setuptools.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from cluster.host.image import locks
from cluster.host.runtime import registry
from cluster.system.errors import PrerequisiteError, UsageError
from cluster.system.files import make_readable, sha256
from cluster.system.paths import ROOT

FOLDER = ROOT / ".build" / "packages"
LOCK = ROOT / "requirements" / "train-cpu.lock"
RESOLVED = "requirements.txt"
"""The file in the folder that lists the installed packages with their hashes."""

_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries=1"]
_LOCKED_BUILDS = ["--only-binary=:all:", "--use-pep517", "--no-build-isolation"]
"""A requirements file may exempt packages from the first option; the others build these with packages of `.venv`."""
_TENSORFLOW = ("tensorflow", "tensorflow-cpu")
_OURS = (*_TENSORFLOW, "tf-keras")
_NO_NETWORK = ("NewConnectionError", "ConnectTimeoutError", "ProxyError", "ReadTimeoutError", "NameResolutionError")


def locate_packages(requirements: Path, python: str) -> Path:
    """Return the folder of a requirements file's packages for one version of Python; the file must be readable."""
    try:
        text = requirements.read_bytes()
    except OSError as error:
        expected = "expected a file as `pip install -r` reads it"
        raise UsageError(f"--requirements {str(requirements)!r}: {error.strerror}; {expected}") from error
    digest = hashlib.sha256()
    parts = [python.encode(), LOCK.read_bytes(), text, *_files_named_in(text.decode(errors="replace"), requirements)]
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return FOLDER / digest.hexdigest()[:16]


def install_packages(requirements: Path, python: str) -> Path:
    """Return the folder with the packages of a requirements file, after creating it if needed."""
    target = locate_packages(requirements, python)
    if target.exists():
        return target
    print(f"getting the packages of {requirements} (once)", file=sys.stderr, flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".filling-", dir=FOLDER) as scratch:
        filled = Path(scratch) / "packages"
        filled.mkdir()
        lines = _resolve(requirements, python, Path(scratch))
        (filled / RESOLVED).write_text("".join(line + "\n" for line in lines))
        if lines:
            pip = [*_PIP, "install", "--no-deps", "--require-hashes", "--target", str(filled), "-r"]
            _run([*pip, str(filled / RESOLVED), *_for_python(python)], requirements)
        make_readable(filled)
        try:
            filled.rename(target)  # atomic, and the first of two concurrent calls wins
        except OSError:
            if not target.exists():
                raise
    return target


def _resolve(requirements: Path, python: str, scratch: Path) -> list[str]:
    """Return the packages to install beyond the locked ones, each as a line of a requirements file."""
    from packaging.utils import canonicalize_name  # here, since only `up` with --requirements needs it

    own = locks.pins("train-cpu")
    # Only one of TensorFlow's two packages is installed, but it satisfies requirements of either.
    kept = [pin for pin in own if pin.name in _TENSORFLOW or pin.applies(python)]
    (scratch / "constraints.txt").write_text("".join(f"{pin.name}=={pin.version}\n" for pin in kept))
    words = ["install", "--dry-run", "--ignore-installed", "--report", str(scratch / "report.json")]
    words += ["--target", str(scratch / "unused"), "-r", str(requirements), "-c", str(scratch / "constraints.txt")]
    _run([*_PIP, *words, *_for_python(python)], requirements)
    report = json.loads((scratch / "report.json").read_text())
    known = {canonicalize_name(name) for name in (*(pin.name for pin in own), *_OURS)}
    others = [package for package in report["install"] if canonicalize_name(package["metadata"]["name"]) not in known]
    return sorted(_line(package, requirements) for package in others)


def _line(package: dict[str, Any], requirements: Path) -> str:
    """Return a package in pip's report as a requirement that only this very file satisfies."""
    name, origin = package["metadata"]["name"], package["download_info"]
    digest = origin.get("archive_info", {}).get("hashes", {}).get("sha256")
    if not digest and origin["url"].startswith("file://"):  # pip 23.0 reports none for a file
        path = Path(unquote(urlsplit(origin["url"]).path))
        digest = sha256(path) if path.is_file() else None
    if not digest:
        problem = f"{name} comes from {origin['url']}, which has no hash"
        fix = "name a release or a wheel, or put its code next to the script"
        raise UsageError(f"--requirements {str(requirements)!r}: {problem}; {fix}")
    return f"{name} @ {origin['url']} --hash=sha256:{digest}"


def _for_python(python: str) -> list[str]:
    """Return pip's options for a version of Python; for any other version than this one, only wheels work."""
    if python == registry.LOCAL.python:
        return _LOCKED_BUILDS
    return ["--python-version", python, "--only-binary=:all:", "--no-compile"]


def _run(command: list[str], requirements: Path) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode == 0:
        return
    printed = done.stdout.strip()
    if "No module named pip" in printed:
        raise PrerequisiteError(f"--requirements needs pip, and {sys.executable} has none; `make setup` installs it")
    option = f"--requirements {str(requirements)!r}: "
    if any(word in printed for word in _NO_NETWORK):
        raise PrerequisiteError(f"{option}no package index answers; connect, or set PIP_INDEX_URL or PIP_FIND_LINKS")
    raise UsageError(option + _gist(printed))


def _gist(printed: str) -> str:
    errors = [line.removeprefix("ERROR: ") for line in printed.splitlines() if line.startswith("ERROR: ")]
    gist = next((line for line in reversed(errors) if not line.startswith("ResolutionImpossible")), "")
    if gist.startswith("No matching distribution"):
        gist += "; only wheels are taken: a line such as `--no-binary NAME` has that package built from its source"
    requested = re.findall(r"^ +((?:The user requested|.* depends on) .*)$", printed, re.MULTILINE)
    lines = dict.fromkeys(line.replace("The user requested (constraint)", "tasks have") for line in requested)
    if lines:
        return f"{gist} ({'; '.join(lines)})"
    return gist or (printed.splitlines()[-1] if printed else "pip failed")


def _files_named_in(text: str, requirements: Path) -> list[bytes]:
    """Return the contents of the files that a requirements file names, which are part of its content."""
    contents = []
    for word in re.findall(r"[^\s=@]+", text):
        for base in (Path.cwd(), requirements.absolute().parent):
            path = base / word.removeprefix("file://")
            if path.is_file():
                contents.append(path.read_bytes())
                break
    return contents
