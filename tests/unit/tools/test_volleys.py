"""The faults of a campaign: which are drawn."""

from itertools import islice

from cluster.contract import spec
from tests.tools.campaign import volleys
from tests.tools.campaign.volleys import Volley

KINDS = set(volleys.WEIGHTS)
CLUSTER = spec.build(workers=2)


def drawn(seed: str, count: int, kinds: set[str] = KINDS) -> list[tuple[Volley, Volley]]:
    return list(islice(volleys.draw(CLUSTER, seed, kinds), count))


def test_the_same_seed_draws_the_same_faults():
    first, again, other = (drawn(seed, 50) for seed in ("a 1", "a 1", "a 2"))
    assert first == again != other


def test_every_kind_phase_task_and_number_of_faults_is_drawn():
    pairs = [pair for seed in range(20) for pair in drawn(str(seed), 50)]
    shots = [shot for middle, _ in pairs for shot in middle.shots]
    assert KINDS == {shot.kind for shot in shots}
    assert {task.name for task in CLUSTER.tasks} == {shot.task for shot in shots}
    assert {"", *volleys.OPENING, *volleys.RECOVERING} == {shot.phase for shot in shots}
    assert {1, 2, 4, 5, 6, 7} == {len(middle.shots) for middle, _ in pairs}
    assert {"kill"} == {shot.kind for middle, _ in drawn("b", 50, {"kill"}) for shot in middle.shots}


def test_a_run_is_resumed_once_at_most():
    for seed in range(20):
        shots = [shot.kind for middle, _ in drawn(str(seed), 200) for shot in middle.shots]
        assert 1 == sum(kind in volleys.ENDING for kind in shots)


def test_the_last_volleys_of_a_run_come_in_its_last_phases():
    assert set(volleys.LAST_PHASES) == {last.shots[0].phase for _, last in drawn("last", 50)}
    assert all(middle.shots[1:] == last.shots[1:] for middle, last in drawn("last", 50))
