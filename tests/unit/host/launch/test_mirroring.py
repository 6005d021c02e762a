"""`--mirror` takes the URL of a folder in a store, and tries it; its credentials go to the environment alone."""

import os

import pytest

from cluster.host.launch import mirroring, planning, startup
from cluster.host.options.request import Request
from cluster.host.runtime import mirror
from cluster.system.errors import PrerequisiteError, UsageError
from tests.support.launching import no_shell

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


@pytest.mark.parametrize(
    ("typed", "clean"),
    [
        ("s3://KEY:s%2Fcret@bucket/a/?region=eu-west-1", "s3://bucket/a?region=eu-west-1"),
        ("gs://anonymous@bucket/a", "gs://anonymous@bucket/a"),
        ("file:///tmp/a", "file:///tmp/a"),
        *((wrong, None) for wrong in ("s3://K:s/cret@bucket/a", "s3://bucket/a?token=s/cret", "gs://u:s/cret@bucket")),
        *(
            (wrong, None)
            for wrong in ("bucket/a", "s3:///a", "http://bucket", "file://host/a", "file:///", "s3://a/b#c")
        ),
    ],
)
def test_no_credentials_stay_in_a_request(typed, clean, monkeypatch):
    for name in KEYS:
        monkeypatch.setenv(name, "another")
    if clean is None:
        with pytest.raises(UsageError) as refused:
            mirroring.locate_mirror(Request(mirror=typed))
        assert "cret" not in str(refused.value)
        return
    assert clean == mirroring.locate_mirror(Request(mirror=typed)).mirror
    folder, mark, query = clean.partition("?")
    request = mirroring.locate_mirror(Request(resume=f"{folder}/demo{mark}{query}"))
    assert (clean, "demo") == (request.mirror, request.resume)
    if "KEY" in typed:
        assert ["KEY", "s/cret", None] == [os.environ.get(name) for name in KEYS]


def test_a_mirror_is_tried_before_anything_starts_and_kept_by_a_resume(resolved, stopped_run, monkeypatch, tmp_path):
    uploaded, requested = [], {"runtime": "local", "tensorboard_port": "0"}
    monkeypatch.setattr(mirror, "start_upload", uploaded.append)
    refused = planning.plan(Request(name="none", mirror="file:///proc/store", **requested))
    with pytest.raises(PrerequisiteError):
        startup.start(refused, no_shell, began=123.0)
    assert not refused.run.path.exists()
    run = stopped_run(name="one", mirror=f"file://{tmp_path}/store")
    assert [run] == uploaded
    again = planning.plan(Request(resume="one", **requested))
    assert (run.started.mirror, run.started.mirror_id) == (again.mirror, again.mirror_id)
    assert (16, "") == (len(again.mirror_id), planning.plan(Request(resume="one", mirror="none", **requested)).mirror)
