"""A plan and findings, in lines."""

import pytest

from cluster.host.view.findings import findings_lines
from cluster.host.view.plan import plan_lines

BATCH = {"global_batch": 192, "replica_batch": 192, "micro_batches": 1, "micro_batch": 192}


def test_a_plan_says_what_each_task_gets(run):
    task = {"task": "chief", "address": "chief:2222", "tf_config": None}
    value = {"run": "demo", "strategy": "OneDeviceStrategy", "replicas": 1, "runtime": "local", "tasks": [task]}
    assert [
        "run demo: OneDeviceStrategy, 1 replica, runtime local",
        "global batch 192: 192 a replica and step",
        "chief  chief:2222  no TF_CONFIG: it trains alone",
    ] == plan_lines(value | BATCH)
    in_parts = plan_lines(value | BATCH | {"micro_batches": 4, "micro_batch": 48})
    assert "global batch 192: 192 a replica and step, in micro-batches of 48" == in_parts[1]


TRAINING = {"precision": "fp32", "optimizer": "adam", "learning_rate": 0.002, "scaling": "none", "warmup_steps": 100}

SCALED = {"precision": "bf16", "optimizer": "sgd", "base_learning_rate": 0.1, "base_batch": 48, "warmup_steps": 0}


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        (
            TRAINING | {"clip_norm": 0.0},
            "precision fp32, adam, learning rate 0.002 after 100 steps of warm-up, gradients not clipped",
        ),
        (
            SCALED | {"learning_rate": 0.4, "scaling": "linear", "clip_norm": 1.5},
            "precision bf16, sgd, learning rate 0.4 (linear: 0.1 x 192/48) at once, gradients clipped to norm 1.5",
        ),
        (
            SCALED | {"learning_rate": 0.2, "scaling": "sqrt", "clip_norm": 0.0},
            "precision bf16, sgd, learning rate 0.2 (sqrt: 0.1 x sqrt(192/48)) at once, gradients not clipped",
        ),
    ],
)
def test_a_plan_says_in_one_line_how_gradients_become_updates(training, expected):
    value = {"run": "demo", "strategy": "OneDeviceStrategy", "replicas": 1, "runtime": "local", "tasks": []}
    with_task = value | {"tasks": [{"task": "chief", "address": "chief:2222", "tf_config": None}]}
    assert expected == plan_lines(with_task | BATCH | {"training": training})[2]


def test_findings_end_with_their_fix(tmp_path):
    found = [
        {"check": "python", "state": "ok", "detail": "3.11.2", "fix": ""},
        {"check": "data", "state": "warning", "detail": "none", "fix": "invoke data.prepare"},
    ]
    assert [
        "ok       python  3.11.2",
        "warning  data    none; invoke data.prepare",
    ] == findings_lines({"ok": True, "findings": found})
