"""The cluster's description: which strategy a topology gets, what its tasks are called, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.contract import spec
from cluster.contract.spec import ClusterSpec, Role
from cluster.system.errors import UsageError


@pytest.mark.parametrize(
    ("workers", "ps", "devices", "expected", "replicas", "divisor"),
    [
        (0, 0, 1, "OneDeviceStrategy", 1, 1),
        (0, 0, 4, "MirroredStrategy", 4, 4),
        (2, 0, 1, "MultiWorkerMirroredStrategy", 3, 3),
        (2, 0, 2, "MultiWorkerMirroredStrategy", 6, 6),
        (2, 1, 1, "ParameterServerStrategy", 2, 1),  # the chief only coordinates; a step is one worker's
        (3, 2, 2, "ParameterServerStrategy", 6, 2),
    ],
)
def test_the_topology_chooses_the_strategy(workers, ps, devices, expected, replicas, divisor):
    cluster = spec.build(workers, ps, devices=devices)
    assert (expected, replicas, divisor) == (cluster.strategy_class, cluster.replicas, cluster.batch_divisor)


@pytest.mark.parametrize(
    ("strategy", "workers", "ps", "devices"),
    [("one", 0, 0, 1), ("mirrored", 0, 0, 1), ("central", 0, 0, 2), ("multiworker", 1, 0, 1), ("ps", 1, 1, 1)],
)
def test_a_strategy_that_fits_the_topology_is_taken(strategy, workers, ps, devices):
    assert strategy == spec.build(workers, ps, strategy=strategy, devices=devices).strategy


@pytest.mark.parametrize(
    ("strategy", "workers", "ps", "devices", "use"),
    [
        ("one", 0, 0, 2, "--workers 0 --ps 0 --devices 1"),
        ("one", 1, 0, 1, "--workers 0 --ps 0 --devices 1"),
        ("mirrored", 2, 0, 1, "--workers 0 --ps 0"),
        ("central", 2, 1, 1, "--workers 0 --ps 0"),
        ("multiworker", 0, 0, 1, "--workers 1 or more and --ps 0"),
        ("multiworker", 2, 1, 1, "--workers 1 or more and --ps 0"),
        ("ps", 2, 0, 1, "--workers 1 or more and --ps 1 or more"),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused_with_what_would(strategy, workers, ps, devices, use):
    with pytest.raises(UsageError) as refused:
        spec.build(workers, ps, strategy=strategy, devices=devices)
    requested = f"--strategy {strategy} cannot run on --workers {workers} --ps {ps} --devices {devices}"
    assert f"{requested}: use {use}" == str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": "-1"}, "--workers '-1': expected a whole number from 0 to 512"),
        ({"workers": "2.5"}, "--workers '2.5': expected a whole number from 0 to 512"),
        ({"workers": "two"}, "--workers 'two': expected a whole number from 0 to 512"),
        ({"workers": "10000"}, "--workers '10000': expected a whole number from 0 to 512"),
        ({"workers": ""}, "--workers '': expected a whole number from 0 to 512"),
        ({"workers": "9" * 5000}, "expected a whole number from 0 to 512"),
        ({"ps": "-1"}, "--ps '-1': expected a whole number from 0 to 512"),
        ({"devices": "0"}, "--devices '0': expected a whole number from 1 to 64"),
        ({"workers": 0, "ps": 1}, "--ps 1 with --workers 0: parameter servers need workers"),
        ({"strategy": "mutliworker"}, "--strategy 'mutliworker' is not a strategy; did you mean 'multiworker'?"),
        ({"strategy": "xyz"}, "known: auto, central, mirrored, multiworker, one, pipeline, ps, tpu"),
    ],
)
def test_what_cannot_be_a_cluster_is_refused(options, message):
    with pytest.raises(UsageError) as refused:
        spec.build(**options)
    assert message in str(refused.value)


def test_tasks_are_named_after_role_and_index():
    cluster = spec.build(2, 1, evaluator=True)
    assert ["chief", "worker-0", "worker-1", "ps-0", "evaluator"] == [task.name for task in cluster.tasks]
    assert "worker-1:2222" == cluster.task("worker-1").address
    assert ["worker-0", "worker-1"] == [task.name for task in cluster.of(Role.WORKER)]


def test_data_workers_and_their_dispatcher_are_no_members_of_the_cluster():
    cluster = spec.build(1, data_workers=2)
    assert ["chief", "worker-0"] == [task.name for task in cluster.members]
    assert ["data-dispatcher", "data-worker-0", "data-worker-1"] == [task.name for task in cluster.tasks[2:]]
    assert 2 == cluster.replicas
    assert () == spec.build(0, data_workers=1).members
    assert cluster == ClusterSpec.from_json(cluster.to_json())


def test_an_unknown_task_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match=r"no task 'worker-2' in this cluster; did you mean 'worker-1'\?"):
        spec.build(2).task("worker-2")


def test_local_tasks_get_an_address_each():
    cluster = spec.build(1, 1, ports=(7001, 7002, 7003))
    assert ["127.0.0.1:7001", "127.0.0.1:7002", "127.0.0.1:7003"] == [task.address for task in cluster.tasks]


@pytest.mark.parametrize(
    ("topology", "alone", "serving"),
    [
        ({"workers": 1}, [], []),
        ({"workers": 1, "evaluator": True}, ["evaluator"], []),
        ({"workers": 1, "ps": 1, "evaluator": True}, ["worker-0", "evaluator"], ["worker-0", "ps-0"]),
        ({"workers": 1, "data_workers": 1}, ["data-dispatcher", "data-worker-0"], ["data-dispatcher", "data-worker-0"]),
    ],
)
def test_who_restarts_alone_and_who_only_serves(topology, alone, serving):
    cluster = spec.build(**topology)
    assert alone == [task.name for task in cluster.tasks if cluster.restarts_alone(task)]
    assert serving == [task.name for task in cluster.tasks if cluster.serves(task)]


@given(st.integers(0, 8), st.integers(0, 3), st.booleans(), st.integers(1, 4))
def test_a_cluster_survives_its_json(workers, ps, evaluator, devices):
    cluster = spec.build(workers, ps if workers else 0, evaluator, devices=devices)
    assert cluster == ClusterSpec.from_json(cluster.to_json())


@pytest.mark.parametrize("name", ["a", "fashion_mnist-20260101-101010", "A.b-c_9", "x" * 63])
def test_a_run_name_is_what_a_folder_and_a_compose_project_allow(name):
    assert name == spec.check_run_name(name)


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "-x", "a b", "ä", "x" * 64, "a\n", "$HOME"])
def test_any_other_run_name_is_refused(name):
    with pytest.raises(UsageError) as refused:
        spec.check_run_name(name)
    assert repr(name) in str(refused.value)


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        ({"workers": 2}, {"chief": [], "worker-0": ["chief"], "worker-1": ["chief"]}),
        ({"workers": 1, "ps": 1}, {"chief": ["worker-0", "ps-0"], "worker-0": [], "ps-0": []}),
        ({"workers": 0}, {"chief": []}),
    ],
)
def test_who_calls_whom_first(topology, expected):
    cluster = spec.build(**topology)
    assert expected == {task.name: [other.name for other in cluster.calls_first(task)] for task in cluster.tasks}
