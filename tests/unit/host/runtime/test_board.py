"""TensorBoard is opened with cards pinned."""

import importlib.util
import io
import json
import zipfile
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
from tensorboard.backend.application import TensorBoardWSGI
from tensorboard.plugins.base_plugin import TBContext
from werkzeug.test import Client

from cluster.host.runtime import tensorboard
from cluster.system.paths import ROOT


def load() -> SimpleNamespace:
    spec = importlib.util.spec_from_file_location("board", tensorboard.PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    board = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(board)
    return SimpleNamespace(**vars(board))


def zipped(text: str) -> io.BytesIO:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("index.html", text)
    return file


def test_runs_are_named_by_run_and_task(tmp_path):
    for folder in ("one/tensorboard/chief", "one/tensorboard/chief/keras/train", "two/work/chief/logs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "events.out.tfevents.1").touch()
    runs = load().Multiplexer().AddRunsFromDirectory(str(tmp_path)).Runs()
    assert {"one/chief", "one/chief/keras/train", "two/work/chief/logs"} == set(runs)


def test_the_container_runs_the_same_program():
    stage = (ROOT / "docker" / "Dockerfile").read_text().partition(" AS tensorboard\n")[2].partition("\nFROM ")[0]
    assert f'ENTRYPOINT ["python", "/app/{tensorboard.PROGRAM.name}"]' in stage
    assert "entrypoint" not in (ROOT / "compose" / "compose.yaml").read_text()


@pytest.mark.parametrize("path", ["/", "/index.html"])
def test_whoever_opens_it_sees_pinned_cards_and_whoever_chose_others_keeps_them(path):
    board = load()
    context = TBContext(assets_zip_provider=lambda: zipped("the page"))
    client = Client(TensorBoardWSGI([board.Loader().load(context)]))
    sent = client.get(path)
    (cards,) = parse_qs(urlsplit(sent.headers["Location"]).query)["pinnedCards"]
    assert (302, list(board.PINNED)) == (sent.status_code, [card["tag"] for card in json.loads(cards)])
    for query in (sent.headers["Location"], "?pinnedCards=[]"):
        assert "the page" in client.get(path + query).text
