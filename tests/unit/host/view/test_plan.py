"""A plan and findings, in lines."""

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
