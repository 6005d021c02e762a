"""From SIGKILL of a task to the next new step: with warm spares that have rehearsed, and without."""

from __future__ import annotations

import json
import time
from statistics import median

from benchmarks.runs import Bench, bench
from cluster import chaos

ROUNDS = 2
VICTIMS = ("worker-1", "chief", "worker-0")
CALM_S = 25.0
"""Training before each kill: a spare is started 10 s after its task began to train, and takes some to get ready."""
STEPS = 100_000


def measure(runs: Bench, name: str, spare: str) -> list[chaos.Result]:
    """Kill one task after the other of a run that trains."""
    run = runs.up(name, "--workers=2", "--checkpoint-every=100", "--detach", steps=STEPS, WARM_SPARE=spare)
    results = []
    for victim in VICTIMS:
        time.sleep(CALM_S)
        results.append(chaos.inflict(run, chaos.Fault("kill", victim)))
    runs.invoke("stop", name)
    return results


def main() -> None:
    """Measure both in turn, and print what came out."""
    found: dict[str, list[chaos.Result]] = {"0": [], "1": []}
    with bench() as runs:
        for number in range(ROUNDS):
            for spare, results in found.items():
                results.extend(measure(runs, f"spare-{spare}-{number}", spare))
    medians = {}
    for spare, results in found.items():
        resumed = sorted(result.resumed_s for result in results if result.resumed_s is not None)
        detected = sorted(result.detected_s for result in results if result.detected_s is not None)
        medians[spare] = median(resumed)
        told = {"detected_s": detected, "resumed_s": resumed, "median_resumed_s": medians[spare]}
        print(json.dumps({"warm_spare": spare == "1", **told}))
    print(
        f"with warm spares {medians['1']:.2f} s, without {medians['0']:.2f} s: {medians['0'] / medians['1']:.2f} times"
    )


if __name__ == "__main__":
    main()
