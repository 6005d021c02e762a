"""TensorBoard, with runs called RUN/TASK, and with the cards that one looks at first pinned: loss, accuracy and speed.

TensorBoard keeps pinned cards in a page's address and has no setting for them. So whoever opens it without any is sent
to the address that has these. TensorBoard's own `main.py` is meant to be replaced by a file such as this one.
"""

from __future__ import annotations

import functools
import json
import sys
import urllib.parse

from absl import app
from tensorboard import default, main_lib, program
from tensorboard.backend.event_processing import data_ingester, plugin_event_multiplexer
from tensorboard.plugins import base_plugin
from tensorboard.plugins.core import core_plugin

PINNED = ("train/loss", "eval/loss", "eval/accuracy", "perf/examples_per_s")
"""Tags of scalars. Those that a run does not have are left out by the page."""

HEADERS = (
    ("Content-Type", "text/html"),
    ("Content-Length", "0"),
    ("Content-Security-Policy", "default-src 'none'"),
    ("X-Content-Type-Options", "nosniff"),
)
"""Of an answer without content; TensorBoard warns of one without the last two."""


def query() -> str:
    """Return the part of the address that pins the cards, and shows all lines as they are."""
    cards = [{"plugin": "scalars", "tag": tag} for tag in PINNED]
    return "?" + urllib.parse.urlencode({"pinnedCards": json.dumps(cards, separators=(",", ":")), "smoothing": 0})


class Multiplexer(plugin_event_multiplexer.EventMultiplexer):
    """Calls a run RUN/TASK instead of RUN/tensorboard/TASK, the path of its folder."""

    def AddRun(self, path, name=None):  # noqa: N802  # TensorBoard's name
        """Add a run."""
        return super().AddRun(path, (name or path).replace("/tensorboard/", "/", 1))


class Loader(core_plugin.CorePluginLoader):
    """Makes the plugin that serves the page, and all else that is no tab; the flags are TensorBoard's."""

    def load(self, context):
        """Return the plugin. It is no subclass: only the class itself serves paths without a prefix."""
        plugin = super().load(context)
        apps = plugin.get_plugin_apps()
        pinned = functools.partial(_serve_pinned, apps["/"])
        plugin.get_plugin_apps = lambda: apps | dict.fromkeys(("/", "/index.html"), pinned)
        return plugin


def _serve_pinned(index, environ, start_response):
    if environ.get("QUERY_STRING"):
        return index(environ, start_response)
    start_response("302 Found", [("Location", query()), *HEADERS])
    return []


def main() -> None:
    """Run TensorBoard, as its own `main.py` does."""
    main_lib.global_init()
    others = [each for each in default.get_plugins() if not isinstance(each, core_plugin.CorePluginLoader)]
    board = program.TensorBoard(plugins=[Loader(include_debug_info=True), *others])
    data_ingester.plugin_event_multiplexer.EventMultiplexer = Multiplexer
    try:
        # The fast loader is another program, which knows no other names.
        app.run(board.main, flags_parser=lambda words: board.configure([*words, "--load_fast=false"]))
    except base_plugin.FlagsError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
