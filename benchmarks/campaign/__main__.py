"""Fault injection into many runs, in every phase and several at once: `python -m benchmarks.campaign --help`.

`cases.py` lists the kinds of runs, `volleys.py` draws the faults and `injection.py` injects them. `campaign.py` makes
one run after the other and compares it with an undisturbed one; `record.py` counts the results.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys

from benchmarks import documents
from benchmarks.campaign import campaign, record
from benchmarks.campaign.cases import CASES
from cluster.host.runtime import registry
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, ClusterError


def main() -> int:
    """Inject the faults, and print a row for each run; return the exit code."""
    parser = argparse.ArgumentParser(description="Inject faults into runs; exit code 1 if one is lost.")
    parser.add_argument("--faults", type=int, default=20, help="after which no further run is started")
    parser.add_argument("--minutes", type=float, default=60, help="after which no further run is started")
    parser.add_argument("--seed", type=int, default=0, help="the same one draws the same faults")
    parser.add_argument("--case", action="append", choices=CASES, help="to run (default: all possible here)")
    parser.add_argument("--write", action="store_true", help="record the runs and renew the table of docs")
    given = parser.parse_args()
    log = functools.partial(print, file=sys.stderr, flush=True)
    keep = record.add if given.write else lambda row: None
    try:
        cases = [CASES[name] for name in given.case or CASES]
        possible = [case for case in cases if given.case or registry.get_runtime(case.runtime).probe().ready]
        rows = campaign.main(possible, given.faults, given.seed, given.minutes * 60, log, keep)
    except ClusterError as error:
        log(f"error: {error}")
        return error.exit_code
    if given.write:
        documents.renew([record.PAGE], record.BEGIN, record.table(record.read()))
    print(json.dumps({"runs": rows}, indent=2))
    return EXIT_FAILED if campaign.failed(rows) else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
