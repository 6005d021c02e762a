"""The git checkout of the running code: its commit, and changes since. All values are empty outside a checkout."""

import subprocess

from cluster.system.files import ROOT, files_sha256


def commit() -> str:
    """Return the commit; empty outside of a git checkout."""
    return _git("rev-parse", "HEAD").decode().strip()


def revision(*ignored: str) -> str:
    """Return the commit, with `-dirty` if files other than `ignored` differ from it; empty outside a git checkout."""
    others = [f":(exclude){name}" for name in ignored]
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *others)
    return commit() + ("-dirty" if changed else "")


def commit_time_s() -> int:
    """Return the commit's time, in seconds since 1970; 0 outside of a git checkout."""
    return int(_git("log", "-1", "--format=%ct") or 0)


def changes_sha256(*folders: str) -> str | None:
    """Return a hash of the changes in these folders since the commit, including new files; None without changes."""
    changes = _git("diff", "HEAD", "--binary", "--", *folders)
    others = _git("ls-files", "--others", "--exclude-standard", "-z", "--", *folders).decode()
    new = [name for name in others.split("\0") if name and (ROOT / name).is_file()]  # git lists dangling links, too
    return files_sha256(ROOT, new, changes) if changes or new else None


def _git(*words: str) -> bytes:
    if not (ROOT / ".git").exists():  # git would search the folders above, of which one may be another's checkout
        return b""
    try:
        done = subprocess.run(["git", "--no-optional-locks", "-C", str(ROOT), *words], capture_output=True, check=False)
    except FileNotFoundError:
        return b""
    return done.stdout if done.returncode == 0 else b""
