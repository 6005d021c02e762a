"""The cases of a campaign: small trainings with each strategy, all of which end by themselves."""

from __future__ import annotations

from dataclasses import dataclass

TRAINING = (
    *("--global-batch=48", "--epochs=1000", "--steps-per-loop=5", "--log-every=100", "--evaluate-every=50"),
    "--max-steps=500",
)
WITHOUT_WORKERS = (*TRAINING[:-1], "--max-steps=3000")
"""Under parameter servers training continues while a worker starts again: a run needs more steps for as many faults."""
SAVING = "--checkpoint-every=20"
LOOP = "examples/own_loop/loop.py"
LOOP_STEPS = 1500


@dataclass(frozen=True)
class Case:
    """One kind of run.

    Attributes:
        name: its name in the table.
        options: the options of `up`.
        training: the training options after `--`.
        volleys: maximum number of volleys of faults per run.
        repeats: whether its result equals that of an undisturbed run, bit for bit.
        result: the file in the run folder with the result, if it is not in the summary.
        runtime: the runtime of its tasks.
    """

    name: str
    options: tuple[str, ...]
    training: tuple[str, ...] = TRAINING
    volleys: int = 60
    repeats: bool = True
    result: str = ""
    runtime: str = "local"

    def up(self, name: str) -> tuple[str, ...]:
        """Return the words of the command that starts such a run in the background."""
        where = f"--name={name}", f"--runtime={self.runtime}", "--tensorboard-port=0"
        return ("up", *where, *self.options, "--detach", "--", *self.training)


CASES = {
    case.name: case
    for case in (
        Case("multiworker", ("--workers=1", SAVING)),
        Case("multiworker-3", ("--workers=2", SAVING)),
        Case("fit", ("--workers=1", "--loop=fit", SAVING)),
        Case("ps", ("--workers=2", "--ps=1", "--evaluator", SAVING), WITHOUT_WORKERS, repeats=False),
        Case("elastic", ("--workers=1", "--bitwise-elastic=4", SAVING)),
        Case("pipeline", ("--strategy=pipeline", "--workers=1", "--micro-batches=4", SAVING)),
        Case("one", ("--strategy=one", SAVING)),
        Case("mirrored", ("--strategy=mirrored", "--devices=2", SAVING)),
        # It saves nothing: each restart begins with the first step, and 20 kills in a row would end the run.
        Case(
            "script",
            ("--workers=1", f"--script={LOOP}", "--max-external-restarts=100"),
            (str(LOOP_STEPS),),
            volleys=20,
            result="work/chief/line.json",
        ),
        Case("containers", ("--workers=1", SAVING), runtime="docker"),
        Case("containers-ps", ("--workers=1", "--ps=1", SAVING), WITHOUT_WORKERS, runtime="docker", repeats=False),
    )
}
"""By name, in the order in which they take turns."""
