"""The mirror of a run in an object store: its URL, and the local process that uploads to it.

`up` starts the process, which runs as long as the run, even with `--detach`. Its record is next to the run folders,
where no container can write. `cluster/host/control/uploads.py` is the process's program.
"""

import contextlib
import os
import re
import string
import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote, unquote

from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.launch_records import Process
from cluster.contract.schema import Record, dictionary
from cluster.system import processes
from cluster.system.errors import UsageError
from cluster.system.json_files import write_json
from cluster.system.terminal import print_lines
from cluster.system.waiting import wait_until

NONE = "none"
PROGRAM, RECORD = "cluster.host.control.uploads", "mirror"
URL = re.compile(r"(?:(s3|gs)://(?:([^\s/@?#]+)@)?(?=[^/])|(file)://(?=/[^/]))([^\s@?#]+)(?:\?([^\s@?#]*))?")
PARAMETERS = {
    "s3": ("region", "scheme", "endpoint_override", "tls_ca_file_path"),
    "gs": ("scheme", "endpoint_override", "project_id", "retry_limit_seconds"),
}
"""The parameters that a URL of each scheme may have, none of which is secret."""
WAIT_S, POLL_S = 1800.0, 0.1
"""How long `up` waits for the upload of the last files, which continues afterwards, and how often it checks."""


class Upload(Record):
    """The state of the upload process: `.running/NAME.mirror`."""

    id: str
    process: Annotated[dict[str, Any], dictionary(Process)]
    text: str
    """A description of the mirror's contents, and of the error that keeps it from having more."""
    complete: bool = False
    """Whether the run has ended and the mirror is complete."""

    @property
    def alive(self) -> bool:
        return processes.alive(self.process)


def take_credentials(url: str) -> str:
    """Return a mirror's URL without the user and password, which become environment variables of this process.

    The S3 client reads them there, in this process and the upload process; no record, log or task contains them.
    """
    match = URL.fullmatch(url)
    scheme, user, place, query = (match[1] or match[3], match[2] or "", match[4], match[5] or "") if match else [""] * 4
    key, _, secret = user.partition(":")
    has_keys = scheme == "s3" and "" not in (key, secret)
    others = {name for name, _ in parse_qsl(query, keep_blank_values=True)}.difference(PARAMETERS.get(scheme, ()))
    if not match or others or not (has_keys or (scheme, user) in (("gs", "anonymous"), (scheme, ""))):
        shown = re.sub("//.*@", "//", url).partition("?")[0]
        allowed = "; ".join(f"{', '.join(names)} ({name})" for name, names in PARAMETERS.items())
        raise UsageError(
            f"--mirror {shown!r}: expected s3://BUCKET/PATH, gs://BUCKET/PATH or file:///PATH, with KEY:SECRET@ before "
            f"a bucket of s3 or anonymous@ before one of gs, and behind a ? at most {allowed}; @ is %40, a space is %20"
        )
    if has_keys:
        os.environ |= {"AWS_ACCESS_KEY_ID": unquote(key), "AWS_SECRET_ACCESS_KEY": unquote(secret)}
        os.environ.pop("AWS_SESSION_TOKEN", None)  # belongs to other keys
    at = f"{user}@" if user and not has_keys else ""
    place = quote(place, safe=string.punctuation)  # the stores' clients take ASCII alone
    return f"{scheme}://{at}{place.rstrip('/')}" + (f"?{query}" if query else "")


def start_upload(run: RunFolder) -> None:
    """Start the upload process of a run whose tasks have been started, replacing an earlier process."""
    end_upload(run)
    url, run_id = run.started.mirror, run.started.mirror_id
    with run.outside(f"{RECORD}.log").open("wb") as log:
        process = processes.start_detached([sys.executable, "-m", PROGRAM, url, str(run.path), run_id], output=log)
    upload = Upload(id=run_id, process=processes.identity(process.pid), text=url)
    write_json(run.outside(RECORD), upload.to_json())


def read_upload(run: RunFolder) -> Upload | None:
    """Return the state of the newest upload of a run; None without a mirror."""
    upload, started = records.read_record(run.outside(RECORD), Upload.from_json, None), run.started
    return upload if upload and started.mirror and upload.id == started.mirror_id else None


def describe_mirror(run: RunFolder) -> str:
    """Return the state of a run's mirror as a line; empty without a mirror."""
    if (upload := read_upload(run)) is None:
        return ""
    if upload.complete or (upload.alive and not run.summary.exists()):
        return upload.text
    return f"{upload.text}; " + ("the upload continues" if upload.alive else "not complete, the upload has ended")


def await_upload(run: RunFolder) -> None:
    """Wait until the mirror of a run that has ended is complete. Ctrl-C ends the wait, not the upload."""
    if (upload := read_upload(run)) and upload.alive:
        print_lines("uploading the last files to the mirror; Ctrl-C leaves that in the background")
        with contextlib.suppress(KeyboardInterrupt):
            wait_until(lambda: not upload.alive, WAIT_S, POLL_S)


def end_upload(run: RunFolder, wait_s: float = 0.0) -> None:
    """End the upload process, after `wait_s` in which it can end by itself."""
    if upload := records.read_record(run.outside(RECORD), Upload.from_json, None):
        wait_until(lambda: not upload.alive, wait_s, POLL_S)
        processes.end(upload.process)


def end_uploads(runs_dir: Path, wait_s: float) -> None:
    """End the uploads of all runs, including runs that have ended."""
    for path in sorted((runs_dir / ".running").glob(f"*.{RECORD}")):
        end_upload(RunFolder(runs_dir / path.stem), wait_s)
