"""Counts attempts without progress, to decide when a run or a task has failed too often.

An attempt is one generation of the gang, or one start of a task that restarts alone. It ends in one of these ways:

    PROGRAM_FAILURE   the program failed by itself: an exception, an exit code, a crash, lack of memory, a hang
    EXTERNAL          the program was killed or its machine was lost
    LOST_CONTACT      the tasks lost contact and none reports a reason, most likely because of the network
    PLANNED           tasks left or joined the run; this never counts

An attempt makes progress if it reaches a later step than all previous attempts. A newer checkpoint also counts, but
only if the attempt ends before that step: a program that always fails at step 27 may save at step 10, then at 20.
"""

from collections.abc import Collection, Sequence

from cluster.contract import settings
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import EndedAttempt, Event, Generation

PROGRAM_FAILURE, EXTERNAL, LOST_CONTACT, PLANNED = "program failure", "external", "lost contact", "planned"

MAX_RESTARTS = 3
"""Limit of restarts without progress for a program that fails by itself: the default of `--max-restarts`."""
MAX_EXTERNAL_RESTARTS = 20
"""Limit of restarts without progress for a task that is killed: the default of `--max-external-restarts`."""
MAX_LOST_CONTACTS = 10
"""Limit of restarts without progress for tasks that lost contact: higher, since none of them is at fault."""
STEADY_S = 600.0
"""A script that ran this long has made progress, although it reports no steps."""
LONGEST_PAUSE_S = 30.0


def count_without_progress(attempts: Sequence[EndedAttempt], kinds: Collection[str] = (PROGRAM_FAILURE,)) -> int:
    """Return how many attempts have ended in one of these ways since the last progress."""
    count, best, best_then, saved_then = 0, -1, -1, -1
    for attempt in attempts:
        best = max(best, attempt.last_step)
        if attempt.kind not in kinds:
            continue
        # A checkpoint that others saved while the task at fault finished no step is not progress.
        saved = attempt.saved > saved_then and 0 <= attempt.last_step < best_then
        count = 1 if best > best_then or saved or attempt.runtime_s > STEADY_S else count + 1
        best_then, saved_then = best, attempt.saved
    return count


def count_over_limit(
    attempts: Sequence[EndedAttempt], max_restarts: int, max_external_restarts: int = MAX_EXTERNAL_RESTARTS
) -> int:
    """Return the number of attempts without progress, including the last, if it exceeds a limit; otherwise 0."""
    limits = (
        ((PROGRAM_FAILURE,), max_restarts),
        ((PROGRAM_FAILURE, LOST_CONTACT), max(max_restarts, MAX_LOST_CONTACTS)),
        ((EXTERNAL,), max_external_restarts),
    )
    for kinds, most in limits:
        if attempts[-1].kind in kinds and (count := count_without_progress(attempts, kinds)) > most:
            return count
    return 0


def pause_s(attempts: Sequence[EndedAttempt]) -> float:
    """Return the back-off after the last attempt, in seconds; 0 unless it failed by itself or lost contact."""
    if attempts[-1].kind not in (PROGRAM_FAILURE, LOST_CONTACT):
        return 0.0
    count = max(1, count_without_progress(attempts, (PROGRAM_FAILURE, LOST_CONTACT)))
    return float(min(LONGEST_PAUSE_S, settings.seconds("RESTART_PAUSE_S") * 2 ** min(count - 1, 30)))


def attempts_of_gang(run: RunFolder, generation: int) -> list[Generation]:
    """Return how the attempts before this generation ended, since `up` or `scale` began the first of them."""
    since = first_generation(run)
    return [record for record in run.generations() if record.task and since < record.generation <= generation]


def attempts_of_task(run: RunFolder, task: str) -> list[EndedAttempt]:
    """Return how the attempts of a task that restarts alone ended, since `up` or `scale`."""
    return [EndedAttempt.from_json(event.detail) for event in restarted_alone(run, task)]


def restarted_alone(run: RunFolder, task: str) -> list[Event]:
    """Return the events of a task's separate restarts since `up` or `scale`."""
    first = first_generation(run)
    return [e for e in run.events() if (e.task, e.event) == (task, "restarted") and e.generation >= first]


def count_restarts(run: RunFolder, task: str) -> int:
    """Return how often a task's program was restarted since `up` or `scale`, alone or with the gang."""
    return run.generation - first_generation(run) + len(restarted_alone(run, task))


def first_generation(run: RunFolder) -> int:
    """Return the newest generation that `up` or `scale` began, rather than a failure."""
    return max((record.generation for record in run.generations() if not record.task), default=0)


def restart_limits(run: RunFolder) -> tuple[int, int]:
    """Return the values of `--max-restarts` and `--max-external-restarts` that the run was started with."""
    started = run.started
    own, external = started.max_restarts, started.max_external_restarts
    return MAX_RESTARTS if own is None else own, MAX_EXTERNAL_RESTARTS if external is None else external
