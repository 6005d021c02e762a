"""Pictures of TensorBoard's tabs for docs/guides/pictures, taken by a headless browser.

python -m tests.tools.screenshots RUN

The browser is $CHROMIUM, otherwise `chromium-headless-shell` (Debian: apt-get install chromium-headless-shell).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from PIL import Image

from cluster.contract.run.folder import RunFolder
from cluster.host.launch import folders
from cluster.host.runtime import tensorboard
from cluster.system.paths import ROOT
from cluster.system.ports import free_ports
from cluster.system.waiting import wait_until

FOLDER = ROOT / "docs" / "guides" / "pictures"
BROWSER = os.environ.get("CHROMIUM", "chromium-headless-shell")
TABS = {
    "timeseries": (1440, 1060),
    "scalars": (1440, 1060),
    "hparams": (1440, 620),
}
"""TensorBoard's names of its tabs, with the width and height of their pictures. Profile is none of them: its first page
loads its charts from elsewhere."""
MAX_COLOURS = 160
LOAD_S = 60.0
PAGE_MS = 30_000
"""Time that a page has for its requests and drawings, by its own clock: it runs as fast as the machine can."""
BROWSER_S = 180.0


def take_pictures(run: RunFolder) -> None:
    """Take a picture of each tab of TensorBoard for a run that has ended."""
    with tempfile.TemporaryDirectory(prefix="tf-cluster-") as scratch:
        runs_dir = Path(scratch)
        shutil.copytree(run.path / "tensorboard", runs_dir / run.name)
        (port,) = free_ports(1)
        try:
            tensorboard.start(runs_dir, port, tensorboard.PROCESS, _no_shell)
            address = tensorboard.address(port)
            assert wait_until(lambda: _shows_all_tabs(address), LOAD_S, 0.5), f"{run.name} has nothing for some tabs"
            for tab, size in TABS.items():
                _shoot(f"{address}/#{tab}", FOLDER / f"{tab}.png", size)
        finally:
            tensorboard.stop(runs_dir, _no_shell)


def _shows_all_tabs(address: str) -> bool:
    """Whether TensorBoard has read the run, so that every tab has something to show."""
    try:
        with urllib.request.urlopen(f"{address}/data/plugins_listing", timeout=5) as answer:
            listing = json.load(answer)
    except (urllib.error.URLError, OSError, ValueError):
        return False
    return all(listing.get(tab, {}).get("enabled") for tab in TABS)


def _shoot(url: str, path: Path, size: tuple[int, int]) -> None:
    path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="tf-cluster-") as profile:
        command = [
            BROWSER,
            f"--user-data-dir={profile}",
            "--headless",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # Chromium refuses to have one as root
            "--disable-gpu",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing is loaded from elsewhere
            f"--window-size={size[0]},{size[1]}",
            f"--virtual-time-budget={PAGE_MS}",
            f"--screenshot={path}",
            url,
        ]
        subprocess.run(command, timeout=BROWSER_S, check=True)
    with Image.open(path) as picture:  # a page needs few colours, which take a third of the bytes
        few = picture.convert("RGB").quantize(MAX_COLOURS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(path)


def _no_shell(command: str) -> None:
    raise AssertionError(f"a local TensorBoard needs no {command}")


if __name__ == "__main__":
    take_pictures(folders.find_run(sys.argv[1]))
