#!/usr/bin/env python3
"""The command `tf-cluster`: runs the tasks of this project from any folder.

It uses only the standard library, as of Python 3.6: in a checkout any `python3` may run it. An installed copy is first
copied to the user's cache, where commands may write, and the environment of the locks is created there once; a checkout
has its own environment. Runs are in the folder where the command is called, and data is in the cache, shared by all of
the user's projects.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parents[1]
"""The checkout, or the installed copy of its files."""
ACCELERATOR = os.environ.get("ACCELERATOR") or "cpu"
LOCKS = ("build", "host", f"train-{ACCELERATOR}", "tensorboard")
"""The locks of the environment, in the order in which they are installed."""
COMPLETE = ".host"
"""The file in an environment that marks its installation as complete; `make setup` writes it, too."""
EXIT_USAGE, EXIT_PREREQUISITE = 2, 3
NO_NETWORK = ("ProxyError", "NewConnectionError", "ConnectTimeoutError", "NameResolutionError")


def main() -> NoReturn:
    """Run the tasks with the arguments of this program."""
    cache = cache_folder()
    if ACCELERATOR not in ("cpu", "gpu"):
        fail(f"ACCELERATOR={ACCELERATOR}: expected cpu or gpu", EXIT_USAGE)
    try:
        runs = os.environ.get("RUNS_DIR") or str(Path.cwd() / "runs")
    except FileNotFoundError:
        fail("the current folder was removed; change to one that exists")
    try:
        if (HERE / "Makefile").exists():
            code, venv = HERE, HERE / ".venv"
            if not (venv / COMPLETE).exists():
                fail(f"{HERE} has no environment; run `make setup` there")
        else:
            code, venv = copy_files(HERE, cache), environment(cache, HERE)
            create_environment(venv, code)
    except OSError as error:
        fail(f"{error.filename or cache}: {error.strerror}; correct that, or set XDG_CACHE_HOME to another folder")
    except KeyboardInterrupt:
        sys.exit(130)
    os.environ.pop("PYTHONSAFEPATH", None)  # the tasks are found next to `tasks.py`
    data = os.environ.get("DATA_DIR") or str(cache / "data")
    os.environ.update(INVOKED_AS="tf-cluster", RUNS_DIR=runs, DATA_DIR=data)
    python = str(venv / "bin" / "python")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the task can report it
    try:
        os.execv(python, [python, str(code / "tasks.py"), *sys.argv[1:]])  # noqa: S606  # on purpose without a shell
    except OSError as error:  # such as after an update of the system's Python
        fail(f"{python} cannot be started ({error.strerror}); delete {venv} and create it again")


def cache_folder() -> Path:
    """Return this project's folder in the user's cache."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "tf-cluster"
    except RuntimeError:
        fail("no home folder is known; set XDG_CACHE_HOME to a folder of yours")


def copy_files(source: Path, cache: Path) -> Path:
    """Copy the project's files to a folder of the cache that is named after their content, unless it exists."""
    paths = sorted(path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(source)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    target = cache / f"code-{digest.hexdigest()[:12]}"
    with locked(target):
        if not target.exists():
            scratch = target.with_suffix(".new")
            shutil.rmtree(scratch, ignore_errors=True)
            for path in paths:
                copy = scratch / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
            scratch.rename(target)  # atomic
    return target


def environment(cache: Path, code: Path) -> Path:
    """Return the folder of the environment, which is named after the locks and the version of Python."""
    texts = [sys.version.encode(), *((code / "requirements" / f"{name}.lock").read_bytes() for name in LOCKS)]
    return cache / f"venv-{hashlib.sha256(b'|'.join(texts)).hexdigest()[:12]}"


def create_environment(venv: Path, code: Path) -> None:
    """Create the environment with exactly the locked packages, unless it is complete."""
    log = venv.with_suffix(".log")
    with locked(venv):
        if (venv / COMPLETE).exists():
            return
        print(f"setting up {venv} (TensorFlow and what the tasks need; once, about two minutes)", file=sys.stderr)
        shutil.rmtree(venv, ignore_errors=True)
        if subprocess.run([sys.executable, "-m", "venv", venv], check=False).returncode:
            fail("python3 -m venv failed; install it (Debian: apt-get install python3-venv)")
        pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        how = ["--require-hashes", "--no-deps", "--use-pep517", "--no-build-isolation"]
        for names in (LOCKS[:1], LOCKS[1:]):
            files = [f"--requirement={code / 'requirements' / name}.lock" for name in names]
            with log.open("w") as output:
                done = subprocess.run([*pip, "install", *how, *files], stdout=output, stderr=output, check=False)
            if done.returncode:
                text = log.read_text(errors="replace")
                if any(word in text for word in NO_NETWORK):
                    fail(f"the package index cannot be reached; set HTTPS_PROXY or PIP_INDEX_URL (pip's output: {log})")
                fail(f"pip failed; its output is in {log}")
        (venv / COMPLETE).touch()


@contextlib.contextmanager
def locked(path: Path) -> "Iterator[None]":
    """Context manager that lets only one process at a time create a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fail(message: str, code: int = EXIT_PREREQUISITE) -> NoReturn:
    """Print an error in one line and exit."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
