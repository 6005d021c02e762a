"""The task that compares values."""

from __future__ import annotations

from cluster.contract import spec
from cluster.host import sweep as sweeping
from cluster.host.cli.command_line import takes_request
from cluster.system.errors import UsageError


@takes_request(
    "fresh",
    "detach",
    "trust",
    positional=("file",),
    over="OPTION=VALUE,VALUE: values to compare, of an option of `up` or of training; may be repeated (default: none)",
    parallel="trials at a time (default: 1)",
    halving="step at which trials that are not among the best third are stopped, and again at each 3 times as far "
    "(default: 0, none are)",
)
def sweep(c, request, over=None, parallel="1", halving="0"):
    """Train once with every combination of values, and list the runs, the best first; --resume continues a sweep."""
    at_a_time = spec.parse_count("parallel", parallel, 1, sweeping.MAX_PARALLEL)
    first_rung = spec.parse_count("halving", halving, 0, 10**9)
    if request.resume:
        if over:
            raise UsageError(f"--resume {request.resume}: a sweep continues with its own values; leave --over out")
        planned = sweeping.load_sweep(request.resume)
    else:
        planned = sweeping.plan_sweep(request, over or (), first_rung)
    return sweeping.run_sweep(planned, at_a_time)
