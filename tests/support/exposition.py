"""A strict reader of Prometheus' text format, version 0.0.4."""

import re
import urllib.request

LABEL = r'([a-zA-Z_]\w*)="((?:[^"\\\n]|\\[\\"n])*)"'
SAMPLE = re.compile(rf"(\w+)\{{((?:{LABEL},)*{LABEL})\}} (\S+)", re.ASCII)
Page = dict[tuple[str, ...], float]
"""The value of each series, by the name of its metric and the values of its labels after `run`."""


def read_page(text: str) -> Page:
    """Return the series of a page; fail if Prometheus would reject the page."""
    assert text.endswith("\n")
    page: Page = {}
    described: list[tuple[str, ...]] = []
    for line in text.removesuffix("\n").split("\n"):
        if comment := re.fullmatch(r"# (HELP|TYPE) ([a-zA-Z_]\w*) (.+)", line):
            described.append(comment.groups())
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample, line
        kind, name, _ = described[-1]
        assert ("TYPE", sample[1]) == (kind, name)  # a metric's lines are together, after its description
        (first, _), *labels = re.findall(LABEL, sample[2])
        series = (name, *(re.sub(r"\\(.)", lambda each: {"n": "\n"}.get(each[1], each[1]), text) for _, text in labels))
        assert "run" == first
        assert series not in page
        page[series] = float(sample[sample.lastindex])
    names = dict.fromkeys(name for _, name, _ in described)
    assert [(kind, name) for name in names for kind in ("HELP", "TYPE")] == [each[:2] for each in described]
    return page


def scrape(port: int, path: str = "/metrics") -> Page:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        assert "text/plain; version=0.0.4; charset=utf-8" == answer.headers["Content-Type"]
        return read_page(answer.read().decode())
