"""Renew the table of strategies in docs/reference/strategies.md from short trainings with all of them.

python -m tests.tools.strategies_page
"""

import sys

from benchmarks import documents
from cluster.host.checks import verify
from cluster.host.checks.verify import BAND, OK, PARITY, Row
from cluster.system.files import ROOT

PAGE = ROOT / "docs" / "reference" / "strategies.md"
BEGIN = documents.begin("python -m tests.tools.strategies_page")


def table(rows: list[Row]) -> list[str]:
    """Return the rows as a Markdown table that is the same on every machine where they end the same."""
    lines = ["| options of `up` | strategy | `--loop` | Keras | status | parity |", "|---|---|---|---|---|---|"]
    for case, row in zip(verify.CASES, rows, strict=True):
        parity = "reference" if case == verify.CASES[0] else f"within {PARITY:.0e}".replace("e-0", "e-")
        if not case.kind.synchronous:
            parity = f"asynchronous: within {BAND:.0%}"
        keras, parity = row["keras"] or "-", parity if row["status"] == OK else "-"
        cells = [f"`{case.options}`", row["strategy"], row["loop"], keras, row["status"], parity]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    trained = verify.verify_strategies(print)
    if verify.count_failed(trained):
        sys.exit("\n".join(verify.table_lines(trained)))
    documents.renew([PAGE], BEGIN, table(trained))
