"""When stages computed is recorded by every task, read for a step that all have, and drawn."""

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from cluster.contract import spec
from cluster.contract.run.folder import RunFolder
from cluster.system.errors import PrerequisiteError
from cluster.system.json_files import write_json
from train.pipeline import schedule, timeline
from train.pipeline.marks import Marks, marks_call
from train.pipeline.schedule import Action, Instruction, Span


@pytest.fixture
def run(tmp_path):
    """A run of two stages, each a task."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    write_json(folder.cluster, spec.build(workers=1, strategy="pipeline").listening((20_001, 20_002)).to_json())
    write_json(folder.config, {"micro_batches": 2, "pipeline": {"schedule": "1f1b"}})
    return folder


def spans_of(stage, begin=100.0):
    simulated = schedule.simulate(schedule.build("1f1b", 2, 2), [1.0, 1.0], [2.0, 2.0])
    return [Span(s.stage, s.instruction, begin + s.begin_s, begin + s.end_s) for s in simulated if s.stage == stage]


def test_the_newest_step_that_all_tasks_recorded_is_read(run):
    chief, worker = timeline.Recorder(run, "chief"), timeline.Recorder(run, "worker-0")
    with pytest.raises(PrerequisiteError):
        timeline.read(run)
    for step in range(1, 7):
        chief.add(step, spans_of(0, step * 100.0))
    with pytest.raises(PrerequisiteError):
        timeline.read(run)
    for step in range(1, 6):  # it has not ended the newest one
        worker.add(step, spans_of(1, step * 100.0))
    step, spans = timeline.read(run)
    assert 5 == step
    assert [*spans_of(0, 500.0), *spans_of(1, 500.0)] == spans
    assert 12 == timeline.computing(spans)


def test_the_record_of_a_task_stays_small(run):
    recorder = timeline.Recorder(run, "chief")
    sizes = []
    for step in range(100, 120):
        recorder.add(step, spans_of(0))
        sizes.append(run.timeline("chief").stat().st_size)
    assert sizes[timeline.KEPT] == sizes[-1]


def test_the_picture_is_saved_where_no_task_can_have_put_a_link(run, tmp_path):
    timeline.Recorder(run, "chief").add(1, spans_of(0))
    timeline.Recorder(run, "worker-0").add(1, spans_of(1))
    assert 1 == timeline.save(run, tmp_path / "own.png")
    assert Image.open(tmp_path / "own.png").size[0] == timeline.WIDTH
    (run.path / "linked.png").symlink_to(tmp_path / "own.png")
    for path in (tmp_path / "none" / "own.png", run.path / "linked.png"):
        with pytest.raises(PrerequisiteError):
            timeline.save(run, path)


def test_what_a_task_wrote_wrongly_is_not_drawn(run):
    timeline.Recorder(run, "worker-0").add(1, spans_of(1))
    write_json(run.timeline("chief"), {"1": [{"stage": 0, "action": "rests"}]})
    with pytest.raises(PrerequisiteError):
        timeline.read(run)


def test_few_calls_are_marked_and_never_the_first():
    marked = [number for number in range(40) if marks_call(number)]
    assert [1, 2, 4, 8, 16, 24, 32] == marked


def test_marks_take_the_times_of_marked_steps_in_order():
    marks = Marks()
    forward, backward = Instruction(Action.FORWARD, 0), Instruction(Action.BACKWARD, 0)

    @tf.function(autograph=False)
    def step(marked):
        marks.begin(marked, tf.cast(marked, tf.int64))
        chain = tf.zeros([])
        for instruction in (forward, backward):
            begun = marks.mark(1, instruction, [chain], ends=False)
            with tf.control_dependencies([begun]):
                chain = tf.reduce_sum(tf.ones([100, 100]))
            chain = marks.mark(1, instruction, [chain], ends=True)
        return chain

    graph = step.get_concrete_function(tf.TensorSpec([], tf.bool)).graph
    assert not [operation for operation in graph.get_operations() if operation.op_def.is_stateful]
    step(tf.constant(False))
    assert [] == marks.take()
    step(tf.constant(True))
    spans = marks.take()
    assert [(1, forward), (1, backward)] == [(span.stage, span.instruction) for span in spans]
    moments = np.array([(span.begin_s, span.end_s) for span in spans]).ravel()
    assert (np.diff(moments) >= 0).all()
    assert [] == marks.take()
