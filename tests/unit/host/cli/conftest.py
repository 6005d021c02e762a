"""A Docker Engine that fails half way."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.host.launch import configuration, startup

IMAGE = {"Id": "sha256:1", "Config": {"Labels": {}}, "RootFS": {"Layers": ["sha256:0"]}}


@pytest.fixture
def engine_that_fails(docker, monkeypatch) -> Callable[[str], Path]:
    """Puts a `docker` on the PATH that fails at one command and has one image; returns the list of calls."""

    def put(fails_at: str) -> Path:
        calls = docker(
            f'case "$*" in\n*"{fails_at}"*) echo "the engine is gone" >&2; exit 17;;\n'
            "info*) echo '\"26.1.5\"';;\n*version*) echo 2.26.1;;\n"
            f"*'{{{{json .}}}}'*) echo '{json.dumps(IMAGE)}';;\n*RootFS*) echo '[[], []]';;\n"
            "image*) echo '{}';;\nesac"
        )
        monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/bin:/bin")
        config = {"dataset": "mnist", "global_batch": 192}
        monkeypatch.setattr(configuration, "resolve_config", lambda *_: (config, (), ""))
        monkeypatch.setattr(startup, "data_command", lambda verb, name, path: "true")
        return calls

    return put
