"""A task's training program that SIGKILL ends once it has reported the step KILLED_AT."""

import os
import signal
import sys

from tests.differential.draw import SCALE
from train import __main__ as program
from train.loops.loop import CallProgress
from train.model import gradients
from train.telemetry import report


def main() -> None:
    killed_at, after = int(os.environ["KILLED_AT"]), report.Report.after

    def reported(self: report.Report, progress: CallProgress) -> None:
        after(self, progress)
        if killed_at and progress.step >= killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    report.Report.after = reported
    gradients.FIRST_SCALE = SCALE
    code = program.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
