"""Check a release of the version in pyproject.toml, and make what is published with it.

python .ci/release.py --dry                  every check, and a list of what a release publishes
python .ci/release.py                        the same on the hosted runner of release.yml, which then publishes dist/
python .ci/release.py --image train-cpu      that image's tag, build arguments and labels, for a step of release.yml
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cluster.host.image import images  # noqa: E402
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, ClusterError, RunFailed, UsageError, nearest  # noqa: E402

WORKFLOW = "/.github/workflows/release.yml@refs/tags/v"
"""In GITHUB_WORKFLOW_REF of the one workflow that publishes."""
IMAGES = ("train-cpu", "train-gpu", "tensorboard")
VERSIONS = {
    "tasks.py": r'Program\(version="([^"]+)"',
    "CHANGELOG.md": r"^## (\S+)",
    "docs/compare.md": r"^\| tf-cluster \|.*\| (\d+\.\d+\.\d+)",
}
"""Where else the version stands: the first match in each file."""


@dataclass(frozen=True)
class Release:
    """A version, and the checkout that it is made from."""

    root: Path
    dist: Path
    """Gets the wheel, the sdist, their checksums and the notes."""
    hosted: bool = False
    """Whether this runs for a tag, on the runner that publishes."""

    @property
    def version(self) -> str:
        """The version, as pyproject.toml has it."""
        return str(tomllib.loads((self.root / "pyproject.toml").read_text())["project"]["version"])

    def git(self, *words: str) -> str:
        """Return what a git command prints."""
        done = subprocess.run(["git", "-C", str(self.root), *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunFailed(f"git {words[0]}: {done.stderr.strip()}")
        return done.stdout.rstrip()


def check_tree(release: Release) -> str:
    """Check that nothing differs from the commit."""
    if changes := release.git("status", "--porcelain").splitlines():
        raise RunFailed(f"{len(changes)} files differ from the commit, such as {changes[0][3:]}; commit or remove them")
    return f"clean, commit {release.git('rev-parse', '--short=12', 'HEAD')}"


def check_tag(release: Release) -> str:
    """Check that the version's tag is new, or on the hosted runner that it is the one being published."""
    tag = f"v{release.version}"
    exists = bool(release.git("tag", "--list", tag))
    if release.hosted and os.environ.get("GITHUB_REF_NAME") != tag:
        raise RunFailed(f"the tag is {os.environ.get('GITHUB_REF_NAME')}, but pyproject.toml has {release.version}")
    if exists and not release.hosted:
        raise RunFailed(f"{tag} exists already; raise the version in pyproject.toml")
    return tag if release.hosted else f"{tag} is new"


def check_versions(release: Release) -> str:
    """Check that all files name the same version."""
    for name, pattern in VERSIONS.items():
        match = re.search(pattern, (release.root / name).read_text(), re.MULTILINE)
        if match is None or match[1] != release.version:
            found = match[1] if match else "no version"
            raise RunFailed(f"{name} has {found}, pyproject.toml {release.version}; make them agree")
    return f"{release.version} in pyproject.toml, {', '.join(VERSIONS)}"


def check_notes(release: Release) -> str:
    """Check that the changelog has an entry for the version, and write it as the notes of the release."""
    entries = (release.root / "CHANGELOG.md").read_text().split("\n## ")[1:]
    texts = {title.split()[0]: text.strip() for title, _, text in (entry.partition("\n") for entry in entries)}
    notes = texts.get(release.version)
    if not notes:
        raise RunFailed(f"CHANGELOG.md has no entry under `## {release.version}`; write what changed for users")
    if repository := os.environ.get("GITHUB_REPOSITORY"):  # a release page resolves no relative links
        notes = re.sub(r"\]\((?!\w+:)", f"](https://github.com/{repository}/blob/v{release.version}/", notes)
    (release.dist / "notes.md").write_text(notes + "\n")
    return f"{len(notes.splitlines())} lines of CHANGELOG.md"


def check_wheel(release: Release) -> str:
    """Build the wheel and the sdist from the commit twice, in two folders, and compare them byte by byte.

    The first build stays in `dist`, with its checksums.
    """
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        builds = [build(release, Path(folder) / name) for name in ("first", "second")]
        sums = [{path.name: sha256(path) for path in files} for files in builds]
        if sums[0] != sums[1]:
            raise RunFailed(f"two builds of one commit differ: {sums[0]} and {sums[1]}")
        for path in builds[0]:
            shutil.copy(path, release.dist / path.name)
    lines = [f"{digest}  {name}\n" for name, digest in sorted(sums[0].items())]
    (release.dist / "SHA256SUMS").write_text("".join(lines))
    return f"two builds are identical: {', '.join(sorted(sums[0]))}"


def check_audit(release: Release) -> str:
    """Compare the locks with the known vulnerabilities; on the hosted runner the database must answer."""
    done = run(release, [sys.executable, ".ci/audit.py", *(["--required"] if release.hosted else [])])
    return done.removeprefix("audit: ").removeprefix("ok, ")


def check_make(release: Release) -> str:
    """Run `make check`."""
    run(release, ["make", "check"])
    return "make check"


CHECKS: Mapping[str, Callable[[Release], str]] = {
    "tree": check_tree,
    "tag": check_tag,
    "versions": check_versions,
    "notes": check_notes,
    "files": check_wheel,
    "audit": check_audit,
    "linters": check_make,
}


def build(release: Release, folder: Path) -> list[Path]:
    """Build the sdist and the wheel from what git has of the commit; return them."""
    source, output = folder / "source", folder / "output"
    source.mkdir(parents=True)
    epoch = release.git("log", "-1", "--format=%ct")
    archive = folder / "commit.tar"
    release.git("archive", f"--output={archive}", "HEAD")
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")
    command = [sys.executable, "-m", "uv", "build", "--quiet", "--offline", "--no-config", "--no-build-isolation"]
    command += [f"--python={sys.executable}", f"--out-dir={output}", str(source)]
    old_umask = os.umask(0o022)  # the modes of files become part of both archives
    try:
        run(release, command, SOURCE_DATE_EPOCH=epoch)
    finally:
        os.umask(old_umask)
    (sdist,), (wheel,) = output.glob("*.tar.gz"), output.glob("*.whl")
    repack(sdist, int(epoch))
    return [wheel, sdist]


def repack(sdist: Path, epoch: int) -> None:
    """Give every entry of an sdist the commit's time and no owner: setuptools leaves those of the build."""
    content = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as new:
        for entry in sorted(old.getmembers(), key=lambda entry: entry.name):
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = epoch, 0, 0, "", ""
            entry.pax_headers = {}
            new.addfile(entry, old.extractfile(entry) if entry.isfile() else None)
    sdist.write_bytes(gzip.compress(content.getvalue(), mtime=epoch))


def sha256(path: Path) -> str:
    """Return the checksum of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(release: Release, command: Sequence[str], **environment: str) -> str:
    """Return what a command prints; its last lines are the error where it fails."""
    done = subprocess.run(
        command, cwd=release.root, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = "\n       ".join((done.stdout + done.stderr).strip().splitlines()[-10:])
        raise RunFailed(f"{shlex.join(command[:3])} ended with exit code {done.returncode}:\n       {last}")
    return done.stdout.strip()


def image_tag(image: str, version: str) -> str:
    """Return the name under which an image is published."""
    name, _, accelerator = image.partition("-")
    repository = os.environ.get("GITHUB_REPOSITORY", "OWNER/tf-cluster").lower()
    return f"ghcr.io/{repository}/{name}:{version}{accelerator and '-'}{accelerator}"


def image_outputs(image: str, version: str) -> str:
    """Return what a step of the workflow builds an image with, as GITHUB_OUTPUT takes it."""
    if image not in IMAGES:
        raise UsageError(f"--image {image!r} is unknown{nearest(image, IMAGES)}")
    name, _, accelerator = image.partition("-")
    base = images.default_base()
    words = shlex.split(images.build_command(name, accelerator, base))
    tag = image_tag(image, version)
    lines = [f"target={name}", f"tag={tag}", f"name={tag.rpartition(':')[0]}"]
    for key in ("build-arg", "label"):
        values = [word.partition("=")[2] for word in words if word.startswith(f"--{key}=") and word.count("=") > 1]
        lines += [f"{key}s<<END", *values, "END"]
    return "\n".join(lines)


def list_files(release: Release) -> list[str]:
    """Return what a release publishes."""
    sums = (release.dist / "SHA256SUMS").read_text().splitlines()
    return [
        f"on the release page of v{release.version}, with a build attestation of each file:",
        *(f"  {name}  sha256:{digest}" for digest, name in (line.split() for line in sums)),
        f"  SHA256SUMS  sha256:{sha256(release.dist / 'SHA256SUMS')}",
        "images, each with an SBOM, its provenance and a build attestation:",
        *(f"  {image_tag(image, release.version)}" for image in IMAGES),
        "notes, from CHANGELOG.md:",
        *(f"  {line}".rstrip() for line in (release.dist / "notes.md").read_text().splitlines()),
    ]


def check_all(release: Release) -> int:
    """Run every check, also after one has failed; return the exit code."""
    failed = []
    for name, check in CHECKS.items():
        try:
            detail = check(release)
            verdict = "skipped" if detail.startswith("skipped") else "ok"
            print(f"{name:9} {verdict:8} {detail.removeprefix('skipped, ')}", flush=True)
        except ClusterError as error:
            failed.append(name)
            print(f"{name:9} {'failed':8} {error}", flush=True)
    if failed:
        print(f"error: release {release.version}: failed: {', '.join(failed)}; correct that first", file=sys.stderr)
        return EXIT_FAILED
    print("\n".join(["", *list_files(release)]))
    return EXIT_DONE


def main(words: Sequence[str]) -> int:
    """Check a release, or describe one of its images; return the exit code."""
    hosted = os.environ.get("GITHUB_ACTIONS") == "true" and WORKFLOW in os.environ.get("GITHUB_WORKFLOW_REF", "")
    match list(words):
        case ["--image", image]:
            print(image_outputs(image, Release(ROOT, ROOT).version))
            return EXIT_DONE
        case ["--dry"]:
            with tempfile.TemporaryDirectory(prefix="release-") as folder:
                return check_all(Release(ROOT, Path(folder)))
        case [] if hosted:
            dist = ROOT / "dist"
            dist.mkdir(exist_ok=True)
            return check_all(Release(ROOT, dist, hosted=True))
        case []:
            raise UsageError(
                "only .github/workflows/release.yml publishes, for a pushed tag; to check a release here, add --dry"
            )
    raise UsageError(f"unknown arguments {shlex.join(words)}; expected --dry, --image IMAGE or none")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
