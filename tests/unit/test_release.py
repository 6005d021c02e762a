"""Each check of a release refuses its subject."""

import datetime
import http.server
import json
import shutil
import subprocess
import sys
import threading

import pytest

from cluster.system.errors import PrerequisiteError, RunFailed, UsageError
from cluster.system.files import ROOT

sys.path.insert(0, str(ROOT / ".ci"))
import audit
import release

KNOWN = {"id": "GHSA-1", "aliases": ["CVE-1"], "modified": "2026-01-01T00:00:00Z", "affected": []}


@pytest.mark.needs("git")
def test_a_release_that_is_ready_passes_and_any_other_is_refused(tmp_path, monkeypatch):
    for name in ("pyproject.toml", *release.VERSIONS):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for words in ("init --quiet", "add .", "-c user.name=a -c user.email=a@b commit --quiet --message=a"):
        subprocess.run(["git", "-C", tmp_path, *words.split()], check=True)
    ready, hosted = release.Release(tmp_path, tmp_path), release.Release(tmp_path, tmp_path, hosted=True)
    assert all(release.CHECKS[name](ready) for name in ("tree", "tag", "versions", "notes"))
    subprocess.run(["git", "-C", tmp_path, "tag", f"v{ready.version}"], check=True)
    monkeypatch.setenv("GITHUB_REF_NAME", "v9.9.9")
    for tagged in (ready, hosted):
        with pytest.raises(RunFailed):
            release.check_tag(tagged)
    for name in release.VERSIONS:
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace(ready.version, "9.9.9"))
        for check in (release.check_tree, release.check_versions):
            with pytest.raises(RunFailed):
                check(ready)
        (tmp_path / name).write_text(text)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog")
    with pytest.raises(RunFailed):
        release.check_notes(ready)


def test_nothing_is_published_from_a_checkout(monkeypatch):
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    with pytest.raises(UsageError):
        release.main([])


class Database(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        self.answer({"results": [{"vulns": [KNOWN]} if each["version"] == "1.0" else {} for each in queries]})

    def do_GET(self):
        self.answer(KNOWN)

    def answer(self, value):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())


@pytest.mark.slow
def test_a_known_vulnerability_needs_an_exception_that_has_not_expired():
    with http.server.HTTPServer(("127.0.0.1", 0), Database) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = audit.audit([("numpy", "1.0"), ("numpy", "2.0")], address)
        server.shutdown()
    yesterday, today = (datetime.date(2026, 6, day) for day in (1, 2))
    for accepted, problems in (({}, 1), ({"CVE-1": today}, 0), ({"GHSA-1": yesterday}, 1)):
        assert len(audit.unaccepted(found, accepted, today)) == problems
    assert audit.main([], service=address) == 0  # the server is gone
    with pytest.raises(PrerequisiteError):
        audit.main(["--required"], service=address)
