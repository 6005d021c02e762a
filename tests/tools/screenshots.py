"""Pictures of TensorBoard's tabs and of a run's page for docs/guides/pictures, taken by a headless browser.

python -m tests.tools.screenshots RUN
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
from collections.abc import Callable
from pathlib import Path

from cluster.contract.run.folder import RunFolder
from cluster.host.launch import folders
from cluster.host.reports import page
from cluster.host.runtime import tensorboard
from cluster.system.errors import PrerequisiteError, RunFailed
from cluster.system.paths import ROOT
from cluster.system.ports import free_ports
from cluster.system.waiting import wait_until

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
TABS = {
    "timeseries": (1440, 1060),
    "scalars": (1440, 1060),
    "hparams": (1440, 620),
}
"""TensorBoard's names of its tabs, with the width and height of their pictures. Profile is none of them: its first page
loads its charts from elsewhere."""
REPORT = (1080, 1500)
MAX_COLOURS = 160
LOAD_S = 60.0
PAGE_MS = 30_000
"""Time that a page has for its requests and drawings, by its own clock: it runs as fast as the machine can."""
BROWSER_S = 180.0


def browser() -> str:
    """Return the program that takes the pictures: $CHROMIUM, or the first on the PATH.

    Raises:
        PrerequisiteError: there is none.
    """
    wanted = [os.environ["CHROMIUM"]] if os.environ.get("CHROMIUM") else BROWSERS
    for name in wanted:
        if found := shutil.which(name):
            return found
    raise PrerequisiteError(
        f"no browser ({', '.join(wanted)}); install one (Debian: apt-get install chromium-headless-shell), or set "
        "CHROMIUM to the path of a Chromium"
    )


def take(run: RunFolder, folder: Path, log: Callable[[str], None]) -> list[Path]:
    """Take the pictures of a run, each as a PNG of few colours.

    Args:
        run: which has ended.
        folder: where the pictures go.
        log: prints a line.

    Raises:
        PrerequisiteError: a browser is missing.
        RunFailed: the browser made no picture.
    """
    program = browser()
    folder.mkdir(parents=True, exist_ok=True)
    taken: list[Path] = []

    def shoot(name: str, url: str, size: tuple[int, int], *options: str) -> None:
        taken.append(_shoot(program, url, folder / f"{name}.png", size, options))
        log(str(taken[-1]))

    with tempfile.TemporaryDirectory(prefix="tf-cluster-") as scratch:
        runs_dir = Path(scratch)
        shutil.copytree(run.path / "tensorboard", runs_dir / run.name)
        (port,) = free_ports(1)
        try:
            tensorboard.start(runs_dir, port, tensorboard.PROCESS, _no_shell)
            address = tensorboard.address(port)
            for tab in _tabs(address):
                shoot(tab, f"{address}/#{tab}", TABS[tab])
        finally:
            tensorboard.stop(runs_dir, _no_shell)
        path = runs_dir / "report.html"
        path.write_text(page.render_page(run))
        for scheme, number in (("light", 1), ("dark", 0)):
            shoot(f"report-{scheme}", path.as_uri(), REPORT, f"--blink-settings=preferredColorScheme={number}")
    return taken


def _tabs(address: str) -> list[str]:
    """Return the tabs that have something to show, once TensorBoard has read the run."""
    active: set[str] = set()

    def all_active() -> bool:
        try:
            with urllib.request.urlopen(f"{address}/data/plugins_listing", timeout=5) as answer:
                listing = json.load(answer)
        except (urllib.error.URLError, OSError, ValueError):
            return False
        active.update(name for name, plugin in listing.items() if plugin["enabled"])
        return active >= TABS.keys()

    wait_until(all_active, LOAD_S, 0.5)
    return [tab for tab in TABS if tab in active]


def _shoot(program: str, url: str, path: Path, size: tuple[int, int], options: tuple[str, ...]) -> Path:
    command = [
        program,
        "--headless",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),  # Chromium refuses to have one as root
        "--disable-gpu",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing is loaded from elsewhere
        f"--window-size={size[0]},{size[1]}",
        f"--virtual-time-budget={PAGE_MS}",
        *options,
        f"--screenshot={path}",
        url,
    ]
    path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="tf-cluster-") as profile:
        command.insert(1, f"--user-data-dir={profile}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=BROWSER_S, check=False)
    if not path.is_file():
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise RunFailed(f"{program} made no picture of {url} (exit code {done.returncode}): {last}")
    _shrink(path)
    return path


def _shrink(path: Path) -> None:
    """Keep few colours: a picture of a page needs no more, and takes a third of the bytes."""
    from PIL import Image  # here, because other tasks do without it

    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(MAX_COLOURS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def _no_shell(command: str) -> None:
    raise AssertionError(f"a local TensorBoard needs no {command}")


if __name__ == "__main__":
    take(folders.find_run(sys.argv[1]), ROOT / "docs" / "guides" / "pictures", print)
