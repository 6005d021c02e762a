"""Access to the Docker Engine. Every call has a timeout, so that a stuck engine cannot block a command."""

import json
import re
from dataclasses import dataclass
from typing import Any

from cluster.system import memory, processes
from cluster.system.errors import PrerequisiteError
from cluster.system.messages import last_output_line

ANSWER_TIMEOUT_S = 10.0
COMPOSE_TIMEOUT_S = 300.0
"""Longest time for Compose to start or end the containers of a run; their own grace periods are shorter."""
BUILD_TIMEOUT_S = 3600.0
"""Longest time to build, import or save an image."""
_ADVICE = re.compile(r"\s*(Run|See) 'docker [^']*--help'[^\n]*$")
"""The last line of an error of the client, after the reason."""


@dataclass(frozen=True)
class Availability:
    """Whether a runtime, such as the Docker Engine, can be used on this machine."""

    ready: bool
    detail: str = ""
    """A description, such as the engine's version, or the reason why it cannot be used."""
    fix: str = ""
    remote: str = ""
    """The address of an engine on another machine, which may not have this one's files; empty for a local one."""


def ask(*words: str, timeout_s: float = ANSWER_TIMEOUT_S) -> tuple[int, str]:
    """Run a docker command; return its exit code and output, or the reason for a failure."""
    code, printed, complained = processes.run(["docker", *words], timeout_s, f"docker {words[0]}")
    return code, printed.strip() if code == 0 else _ADVICE.sub("", complained.strip()) or printed.strip()


def patience_s(command: str) -> float | None:
    """Return the timeout of a shell command of Docker's client, in seconds; None for any other command."""
    if (match := re.search(r"(?:^|\s)docker (\S+)", command)) is None:
        return None
    return COMPOSE_TIMEOUT_S if match[1] == "compose" else BUILD_TIMEOUT_S


def ask_info(field: str) -> tuple[Any, str]:
    """Return a field of `docker info`, or None, and the client's output, such as the reason for a failure."""
    code, text = ask("info", "--format", f"{{{{json .{field}}}}}")
    try:
        return (None if code else json.loads(text.splitlines()[0])), text
    except (ValueError, IndexError):
        return None, text


def probe(*, for_tasks: bool = True) -> Availability:
    """Return whether a Docker Engine with Compose v2 answers and, `for_tasks`, whether they could write their run."""
    code, text = ask("info", "--format", "{{json .ServerVersion}} {{json .SecurityOptions}}")
    quoted, _, options = text.partition(" ")
    if code or not (version := quoted.strip('"')):
        return unavailable(f"no Docker Engine answers ({last_output_line(text)})")
    if for_tasks and (mapped := re.search('"name=(rootless|userns)', options)):
        detail = f"Docker Engine {version} maps users ({mapped[1]}), so that tasks could not write the run folder"
        return Availability(False, detail, "set DOCKER_HOST to an engine that does not")
    code, compose_version = ask("compose", "version", "--short")
    if code != 0:
        return unavailable(f"Docker Engine {version} has no Compose plugin (`docker compose version` fails)")
    # As the client resolves DOCKER_HOST, DOCKER_CONTEXT and its configuration.
    code, host = ask("context", "inspect", "--format", "{{.Endpoints.docker.Host}}")
    remote = "" if code or host.startswith("unix://") else host
    return Availability(True, f"Docker Engine {version}, Compose {compose_version}", remote=remote)


def unavailable(detail: str) -> Availability:
    """Return the `Availability` of an unusable engine, with the reason and a fix."""
    said = detail.lower()
    fix = "install and start Docker with Compose v2"
    if "permission denied" in said or "may not be run" in said:
        fix = "let this user use Docker (`sudo usermod -aG docker $USER`, then log in again)"
    elif "cannot connect" in said or "is the docker daemon running" in said or "did not answer" in said:
        fix = "start Docker (`sudo systemctl start docker`), or set DOCKER_HOST to where it answers"
    return Availability(False, detail, fix)


def memory_bytes() -> int:
    """Return the memory of the engine's machine, which may be a virtual one; if unknown, that of this machine."""
    size_bytes, _ = ask_info("MemTotal")
    return size_bytes if isinstance(size_bytes, int) and size_bytes > 0 else memory.total_bytes()


def demand(what: str) -> None:
    """Raise an error if no engine answers."""
    if not (engine := probe(for_tasks=False)).ready:
        raise PrerequisiteError(f"{what}: {engine.detail}; {engine.fix}")
