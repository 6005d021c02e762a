"""Compare every locked version with a database of known vulnerabilities (OSV), by `uv audit`.

python .ci/audit.py [--required]

Exit code 0: nothing is known but what requirements/audit.toml accepts, or the database does not answer, which one line
says; 1: a vulnerability that is not accepted (any more); 3: with `--required`, the database does not answer.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cluster.host.image import locks  # noqa: E402
from cluster.system.errors import (  # noqa: E402
    EXIT_DONE,
    ClusterError,
    PrerequisiteError,
    RunFailed,
    UsageError,
)
from cluster.system.messages import counted  # noqa: E402

EXCEPTIONS = ROOT / locks.DIRECTORY / "audit.toml"
UNREACHABLE = ("error sending request", "Request failed after", "HTTP status ")
"""In the errors of uv where no answer came, or a refusal (a proxy, a busy service); others fail the audit."""


def main(words: Sequence[str], *, service: str = "") -> int:
    """Print what the audit found; return the exit code."""
    if unknown := set(words) - {"--required"}:
        raise UsageError(f"unknown argument {min(unknown)!r}; expected --required or none")
    pins = sorted({(pin.name, pin.version) for target in locks.TARGETS for pin in locks.pins(target)})
    accepted = read_exceptions(EXCEPTIONS)
    try:
        found = audit(pins, service)
    except PrerequisiteError as error:
        if words:
            raise
        print(f"audit: skipped, {counted(len(pins), 'locked version')} not compared: {error}")
        return EXIT_DONE
    if problems := unaccepted(found, accepted, datetime.datetime.now(datetime.UTC).date()):
        raise RunFailed("\n       ".join(problems))
    print(f"audit: ok, {counted(len(pins), 'locked version')}, {counted(len(found), 'accepted exception')}")
    return EXIT_DONE


def audit(pins: Iterable[tuple[str, str]], service: str = "") -> list[dict[str, Any]]:
    """Return what is known of these versions, as uv's JSON describes it.

    uv audits a project's own lock, so a temporary project gets one with these versions; `--frozen` resolves nothing.

    Raises:
        PrerequisiteError: the database does not answer.
        RunFailed: uv audited something else, or nothing.
    """
    pins = list(pins)
    registry = 'source = { registry = "index" }'  # a folder: of a server uv would ask the state of every package
    packages = [f'[[package]]\nname = "{name}"\nversion = "{version}"\n{registry}\n' for name, version in pins]
    needs = [f'  {{ name = "{name}", version = "{version}", {registry} }},' for name, version in pins]
    project = ["[[package]]", 'name = "locked"', 'version = "0"', 'source = { virtual = "." }']
    lock = ["version = 1", 'requires-python = ">=3.11"', *packages, *project, "dependencies = [", *needs, "]", ""]
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        names = json.dumps(sorted({name for name, _ in pins}))
        header = '[project]\nname = "locked"\nversion = "0"\nrequires-python = ">=3.11"\n'
        (Path(folder) / "pyproject.toml").write_text(f"{header}dependencies = {names}\n")
        (Path(folder) / "uv.lock").write_text("\n".join(lock))
        command = [sys.executable, "-m", "uv", "audit", "--frozen", "--no-config", "--output-format=json"]
        command += ["--preview-features=audit-command,json-output"]
        command += [f"--service-url={service}"] if service else []
        limits = {"UV_HTTP_RETRIES": "1", "UV_HTTP_TIMEOUT": "20"}  # `make check` does not wait for a missing network
        done = subprocess.run(command, cwd=folder, env=os.environ | limits, capture_output=True, text=True, check=False)
    if any(text in done.stderr for text in UNREACHABLE):
        reason = done.stderr.strip().splitlines()[-1].strip().removeprefix("cause: ").removeprefix("error: ")
        raise PrerequisiteError(f"no database of vulnerabilities answers ({reason})")
    try:
        report = json.loads(done.stdout)
    except ValueError:
        raise RunFailed(f"uv audit failed: {done.stderr.strip()}") from None
    if report["summary"]["audited_packages"] != len(pins):
        raise RunFailed(f"uv audited {report['summary']['audited_packages']} of {len(pins)} locked versions")
    found: list[dict[str, Any]] = report["vulnerabilities"]
    return found


def read_exceptions(path: Path) -> dict[str, datetime.date]:
    """Return the vulnerabilities that are accepted, each with the last day on which it is."""
    accepted = {}
    for entry in tomllib.loads(path.read_text()).get("accepted", []):
        if set(entry) != {"id", "reason", "until"} or not isinstance(entry["until"], datetime.date):
            raise UsageError(f"{path.name}: {entry}: expected id, reason and until (a date such as 2027-01-31)")
        accepted[entry["id"]] = entry["until"]
    return accepted


def unaccepted(
    found: Iterable[Mapping[str, Any]], accepted: Mapping[str, datetime.date], today: datetime.date
) -> list[str]:
    """Return a line for each vulnerability without an exception, or whose exception has expired."""
    problems = []
    for each in found:
        last_days = [accepted[name] for name in (each["id"], *each["aliases"]) if name in accepted]
        if last_days and max(last_days) >= today:
            continue
        package = f"{each['dependency']['name']} {each['dependency']['version']}"
        fix = f"fixed in {', '.join(each['fix_versions'])}" if each["fix_versions"] else "no fixed version"
        expired = f"; its exception ended on {max(last_days)}" if last_days else ""
        names = ", ".join((each["id"], *each["aliases"]))
        what_to_do = f"renew the locks, or accept it in requirements/{EXCEPTIONS.name}"
        problems.append(f"{package}: {names}: {each['summary']} ({fix}{expired}); {what_to_do}")
    return problems


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ClusterError as error:
        print(f"error: audit: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
