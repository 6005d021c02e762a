"""The tasks `docs.*`: what is written in the documentation by a program."""

from __future__ import annotations

from cluster.host.checks import documents
from cluster.host.cli.command_line import task
from cluster.host.options.option import Group
from cluster.host.options.request import OPTIONS
from cluster.system.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "options.md"
BEGIN = documents.begin("invoke docs.options --write")


@task(write="renew them in docs/reference/options.md (default: no)")
def options(c, write=False):
    """Show the options of `up` and `plan` as the tables of docs/reference/options.md."""
    if write:
        documents.renew([PAGE], BEGIN, tables())
    else:
        print("\n".join(tables()))


def tables() -> list[str]:
    """Return a table of options for each group, as Markdown."""
    lines = []
    for group in Group:
        rows = [
            f"| `--{each.key}` | {each.type} | {each.help} | {each.default} |"
            for each in OPTIONS.values()
            if each.group == group
        ]
        if rows:
            lines += [f"## {group}", "", "| option | type | what it is | default |", "|---|---|---|---|", *rows, ""]
    return lines
