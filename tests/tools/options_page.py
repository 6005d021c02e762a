"""Renew the tables of options in docs/reference/options.md.

python -m tests.tools.options_page
"""

from benchmarks import documents
from cluster.host.options.request import OPTIONS, Group
from cluster.system.files import ROOT

PAGE = ROOT / "docs" / "reference" / "options.md"
BEGIN = documents.begin("python -m tests.tools.options_page")


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


if __name__ == "__main__":
    documents.renew([PAGE], BEGIN, tables())
