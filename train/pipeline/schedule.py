"""The instructions of each stage of a pipeline, in order, as pure functions.

Three schedules of S stages and M micro-batches:

- `gpipe` (Huang et al. 2019, arXiv:1811.06965): all forwards, then all backwards, then one update.
- `1f1b` (Narayanan et al. 2021, arXiv:2104.04473): after S-1-s forwards, stage s alternates between one forward and
  one backward, so that it holds at most S-s micro-batches; one update at the end. The sums are those of `gpipe`.
- `pipedream` (Harlap et al. 2018, arXiv:1806.03377): the order of `1f1b` with an update after every backward, and
  without waiting for other stages. A micro-batch's backward uses the weights of its forward (weight stashing), so its
  gradient is applied to weights that are S-1-s updates newer.

In all schedules, backwards run in the order 0 to M-1, so that gradients are summed in the order of one device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

SCHEDULES = ("gpipe", "1f1b", "pipedream")


class Opcode(Enum):
    """The action of an instruction. A forward receives and sends activations, a backward gradients."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True)
class Instruction:
    """One action of one stage."""

    opcode: Opcode
    micro_batch: int
    """Number of the micro-batch; for an update, the last one whose gradient it applies."""


def build_programs(schedule: str, stages: int, micro_batches: int) -> list[list[Instruction]]:
    """Return the instructions of each stage for one step, in order."""
    programs = []
    for stage in range(stages):
        ahead = in_flight(schedule, stage, stages, micro_batches)
        program = [Instruction(Opcode.FORWARD, micro_batch) for micro_batch in range(ahead)]
        for micro_batch in range(micro_batches):
            program.append(Instruction(Opcode.BACKWARD, micro_batch))
            if schedule == "pipedream":
                program.append(Instruction(Opcode.UPDATE, micro_batch))
            if micro_batch + ahead < micro_batches:
                program.append(Instruction(Opcode.FORWARD, micro_batch + ahead))
        if schedule != "pipedream":
            program.append(Instruction(Opcode.UPDATE, micro_batches - 1))
        programs.append(program)
    return programs


def in_flight(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """Return the maximum number of micro-batches in a stage between forward and backward."""
    return micro_batches if schedule == "gpipe" else min(stages - stage, micro_batches)


def interleave(programs: Sequence[Sequence[Instruction]]) -> list[tuple[int, Instruction]]:
    """Merge the instructions of all stages into one order in which no instruction must wait."""
    place = [0] * len(programs)
    done: set[tuple[Opcode, int, int]] = set()
    order: list[tuple[int, Instruction]] = []
    while any(at < len(program) for at, program in zip(place, programs, strict=True)):
        before = len(order)
        for stage, program in enumerate(programs):
            while place[stage] < len(program):
                instruction = program[place[stage]]
                opcode, micro_batch = instruction.opcode, instruction.micro_batch
                sender = find_sender(stage, opcode, len(programs))
                if sender is not None and (opcode, sender, micro_batch) not in done:
                    break
                done.add((opcode, stage, micro_batch))
                order.append((stage, instruction))
                place[stage] += 1
        if len(order) == before:
            raise RuntimeError(f"stages wait for each other at instructions {place}")
    return order


def find_sender(stage: int, opcode: Opcode, stages: int) -> int | None:
    """Return the stage whose same instruction sends this instruction's input; None if it receives nothing."""
    sender = {Opcode.FORWARD: stage - 1, Opcode.BACKWARD: stage + 1}.get(opcode, -1)
    return sender if 0 <= sender < stages else None
