"""The user's files of a run: the script that every task runs, the initial weights, and extra packages.

Weights are located before anything starts and copied to the run folder. So every task can read them wherever it runs,
and so can a repetition of the run after the original files are gone.

Packages of `--requirements FILE` are installed once, into `.build/packages/` for PYTHONPATH, each file checked against
the hash from its resolution. Neither .venv nor the image changes: their packages stay as locked. Only wheels are used,
so that nothing is built with unpinned packages; a package that the file names with `--no-binary`, or as an archive, is
built with the locked setuptools.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from cluster.contract import settings
from cluster.contract.recovery.checkpoint_files import find_newest_good
from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import ClusterSpec
from cluster.host.image import locks
from cluster.host.launch.folders import find_run
from cluster.host.options.request import OPTIONS, WEIGHT_SUFFIXES
from cluster.host.runtime import registry
from cluster.system import files
from cluster.system.errors import PrerequisiteError, RunFailed, UsageError
from cluster.system.files import ROOT, make_readable, sha256

PACKAGES = ROOT / ".build" / "packages"
LOCK = ROOT / "requirements" / "train-cpu.lock"
RESOLVED = "requirements.txt"
"""The file in the folder that lists the installed packages with their hashes."""
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries=1", "--no-input"]
_LOCKED_BUILDS = ["--only-binary=:all:", "--use-pep517", "--no-build-isolation"]
"""A requirements file may exempt packages from the first option; the others build these with packages of `.venv`."""
_TENSORFLOW = ("tensorflow", "tensorflow-cpu")
_OURS = (*_TENSORFLOW, "tf-keras")
_NO_NETWORK = ("NewConnectionError", "ConnectTimeoutError", "ProxyError", "ReadTimeoutError", "NameResolutionError")


def find_weights(name: str, previous: RunFolder | None = None) -> tuple[Path, ...]:
    """Return the weight files of a run's newest intact checkpoint, or those of a file; none without a name.

    For a repetition of `previous`, return the copies in its folder. Raises UsageError if there are no weights.
    """
    if not name:
        return ()
    if previous is not None:
        return tuple(sorted(previous.init.glob("*")))
    path = settings.expanded("init-from", name)
    if path.is_file():
        if path.suffix not in WEIGHT_SUFFIXES:
            raise UsageError(f"--init-from {name}: expected a run, or a file that ends in {', '.join(WEIGHT_SUFFIXES)}")
        parts = sorted(path.parent.glob(f"{path.stem}.data-*")) if path.suffix == ".index" else []
        return (path.absolute(), *(part.absolute() for part in parts))
    if OPTIONS["init_from"].names_path(name):
        raise UsageError(f"--init-from {name}: there is no such file; expected a run, or a file with weights")
    if saved := find_newest_good(find_run(name).checkpoints, lambda line: None):
        return tuple(sorted(saved.folder / Path(file).name for file in saved.files))
    raise UsageError(f"--init-from {name}: the run has no intact checkpoint; name another run, or a file with weights")


def copy_weights(found: Sequence[Path], folder: Path) -> None:
    """Copy the files to a run's folder; raise RunFailed if one has been deleted since it was found."""
    if found:
        folder.mkdir()
    for path in found:
        try:
            shutil.copyfile(path, folder / path.name)
        except FileNotFoundError:
            raise RunFailed(f"--init-from: {path} has just been deleted; try again") from None


def check_path(option: str, name: str) -> None:
    """Check that a path has no control characters; raise UsageError otherwise."""
    if not name.isprintable():
        raise UsageError(f"--{option} {name!r}: a path without control characters is expected; rename that file")


def check_script(name: str, runs_dir: Path) -> Path:
    """Return the script's path; raise UsageError if it is unreadable, or its folder must not be shared with tasks."""
    check_path("script", name)
    script = settings.expanded("script", name).resolve()
    if not script.is_file() or not os.access(script, os.R_OK):
        what = "is a folder" if script.is_dir() else "cannot be read" if script.exists() else "does not exist"
        raise UsageError(f"--script {name!r} {what}: expected a Python file that reads TF_CONFIG; name one")
    folder = script.parent
    shared = {Path("/"): "the root of the file system"}
    if home := settings.home():
        shared[home.resolve()] = "your home folder"
    if folder in shared:
        problem = f"is in {shared[folder]}, and tasks see the whole folder of a script"
        raise UsageError(f"--script {name!r} {problem}; move it to a separate folder")
    if folder.is_relative_to(runs_dir.resolve()):
        raise UsageError(f"--script {name!r} is in the folder of the runs, {runs_dir}; copy it to a separate folder")
    return script


def lay_out(script: Path, run: RunFolder, spec: ClusterSpec, seen_at: Path) -> None:
    """Create each task's working folder, `work/TASK`, with a link to each entry of the script's folder.

    So the script finds its files next to itself, and its output is written to the run folder. Existing files stay.
    `seen_at` is the path at which tasks see the script's folder.
    """
    for task in spec.tasks:
        work = run.work(task.name)
        files.make_folder(work)  # does not follow a link that an earlier attempt of the script may have left
        for entry in script.parent.iterdir():
            if run.path.resolve().is_relative_to(os.path.realpath(entry)):
                continue  # it contains the run: walking through the link would not terminate
            link = work / entry.name
            if link.is_symlink():
                link.unlink()
            if not link.exists():
                link.symlink_to(seen_at / entry.name)


def locate_packages(requirements: Path, python: str) -> Path:
    """Return the folder of a requirements file's packages for one version of Python; the file must be readable."""
    try:
        text = requirements.read_bytes()
    except OSError as error:
        expected = "expected a file as `pip install -r` reads it"
        raise UsageError(f"--requirements {str(requirements)!r}: {error.strerror}; {expected}") from error
    parts = [python.encode(), LOCK.read_bytes(), text, *_files_named_in(text.decode(errors="replace"), requirements)]
    return PACKAGES / hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def install_packages(requirements: Path, python: str) -> Path:
    """Return the folder with the packages of a requirements file, after creating it if needed.

    Raises:
        UsageError: the file is unreadable, or names a package that does not exist or conflicts with the locked ones.
        PrerequisiteError: no package index can be reached.
    """
    target = locate_packages(requirements, python)
    if target.exists():
        return target
    print(f"getting the packages of {requirements} (once)", file=sys.stderr, flush=True)
    PACKAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".filling-", dir=PACKAGES) as scratch:
        filled = Path(scratch) / "packages"
        filled.mkdir()
        lines = _resolve(requirements, python, Path(scratch))
        (filled / RESOLVED).write_text("".join(line + "\n" for line in lines))
        if lines:
            pip = [*_PIP, "install", "--no-deps", "--require-hashes", "--target", str(filled), "-r"]
            _run_pip([*pip, str(filled / RESOLVED), *_for_python(python)], requirements)
        make_readable(filled)
        try:
            filled.rename(target)  # atomic, and the first of two concurrent calls wins
        except OSError:
            if not target.exists():
                raise
    return target


def _resolve(requirements: Path, python: str, scratch: Path) -> list[str]:
    from packaging.utils import canonicalize_name  # here, since only `up` with --requirements needs it

    own = locks.pins("train-cpu")
    # Only one of TensorFlow's two packages is installed, but it satisfies requirements of either.
    kept = [pin for pin in own if pin.name in _TENSORFLOW or pin.applies(python)]
    (scratch / "constraints.txt").write_text("".join(f"{pin.name}=={pin.version}\n" for pin in kept))
    words = ["install", "--dry-run", "--ignore-installed", "--report", str(scratch / "report.json")]
    words += ["--target", str(scratch / "unused"), "-r", str(requirements), "-c", str(scratch / "constraints.txt")]
    _run_pip([*_PIP, *words, *_for_python(python)], requirements)
    report = json.loads((scratch / "report.json").read_text())
    known = {canonicalize_name(name) for name in (*(pin.name for pin in own), *_OURS)}
    others = [package for package in report["install"] if canonicalize_name(package["metadata"]["name"]) not in known]
    return sorted(_pin_line(package, requirements) for package in others)


def _pin_line(package: dict[str, Any], requirements: Path) -> str:
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


def _run_pip(command: list[str], requirements: Path) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode == 0:
        return
    printed = done.stdout.strip()
    if "No module named pip" in printed:
        raise PrerequisiteError(f"--requirements needs pip, and {sys.executable} has none; `make setup` installs it")
    option = f"--requirements {str(requirements)!r}: "
    if any(word in printed for word in _NO_NETWORK):
        fix = "connect, or set PIP_INDEX_URL or PIP_FIND_LINKS"
        raise PrerequisiteError(f"{option}the package index cannot be reached; {fix}")
    raise UsageError(option + _summarize_pip(printed))


def _summarize_pip(printed: str) -> str:
    errors = [line.removeprefix("ERROR: ") for line in printed.splitlines() if line.startswith("ERROR: ")]
    gist = next((line for line in reversed(errors) if not line.startswith("ResolutionImpossible")), "")
    if gist.startswith("No matching distribution"):
        gist += "; only wheels are taken: a line such as `--no-binary NAME` has that package built from its source"
        gist += "; and nobody is asked for the login of a private index: put it into the URL, or ~/.netrc"
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
