"""Growth of the time to the first finished step with the number of tasks on this machine."""

from __future__ import annotations

from benchmarks.figures import Figure, Goal, growth
from benchmarks.runs import Bench, cores
from benchmarks.start import until_first_step
from cluster.host.runtime.resources import TASK_MEMORY_BYTES
from cluster.system import memory
from cluster.system.messages import counted

COUNTS = (1, 2, 4, 8, 16)


def measure(bench: Bench) -> list[Figure]:
    """Start each number of tasks that fits into memory, in turn."""
    fit = [count for count in COUNTS if count * TASK_MEMORY_BYTES < memory.free_bytes()]
    counts = [count for count in fit if not bench.quick or count <= 2 * cores()]
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for turn in bench.turns():
        if turn % 3:
            continue  # 16 tasks take long: every third round
        for count, samples in seconds.items():
            samples.append(until_first_step(bench, f"tasks-{count}-{turn}", count - 1))
    title = f"start of {', '.join(map(str, counts[:-1]))} and {counts[-1]} tasks: growth over tasks per core, at worst"
    variants = {counted(count, "task"): samples for count, samples in seconds.items()}
    return [Figure("tasks", title, "s", variants, growth(seconds, cores()), "times", Goal(1.0, at_least=False))]
