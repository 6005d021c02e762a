"""What a task records of the machine that it computes on: what may change a bit, and nothing private."""

import getpass
import json
from pathlib import Path
from types import SimpleNamespace

from cluster.system.json_files import read_json, write_json
from train.telemetry import environment


def test_only_variables_that_matter_are_reported_and_no_path(monkeypatch):
    found = environment.relevant_variables(
        {
            "TF_ENABLE_ONEDNN_OPTS": "0",
            "XLA_FLAGS": "--xla_dump_to=/home/somebody/dump",
            "TF_CONFIG": "{}",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "HOME": "/home/somebody",
        }
    )
    assert "0" == found.pop("TF_ENABLE_ONEDNN_OPTS")
    assert found.pop("XLA_FLAGS").startswith("sha256:")
    assert {} == found


def test_the_manifest_gets_the_data_and_the_environment(run):
    write_json(run.manifest, {"schema": 1})
    source = SimpleNamespace(version="3.0.1", arrays=None, files={})
    environment.record_environment(run, "fashion_mnist", source)
    manifest = read_json(run.manifest)
    assert (1, "3.0.1") == (manifest["schema"], manifest["data"]["version"])
    assert manifest["environment"] == read_json(run.environment)
    assert {"tensorflow-cpu", "keras", "numpy"} <= set(manifest["environment"]["packages"])
    assert manifest["environment"]["cpu"]["model"]
    text = json.dumps(manifest)
    assert str(Path.home()) not in text
    assert f'"{getpass.getuser()}"' not in text
