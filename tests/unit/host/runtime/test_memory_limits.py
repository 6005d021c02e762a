"""How much memory containers may use, and what is reported of a program that needed more."""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from cluster.agent import standby
from cluster.agent.agent import Agent
from cluster.agent.run_view import RunView
from cluster.contract.recovery import attempt_limits
from cluster.host.image import engine
from cluster.host.launch import planning, startup
from cluster.host.options.request import Request
from cluster.host.runtime import resources
from cluster.host.runtime.compose_runtime import Compose
from cluster.host.runtime.resources import Memory
from cluster.system import memory as machine
from cluster.system.errors import PrerequisiteError, UsageError
from cluster.system.json_files import read_json, write_json
from tests.support.launching import WORKING_ENGINE

GIB = 2**30
AMOUNTS = {"": 0, "8GiB": 8 * GIB, "1.5gib": 3 * GIB // 2, "600MiB": 600 * 2**20, "99999TiB": 99999 * 2**40}
NONE = ["8", "8GB", "8 GiB", "-8GiB", "0GiB", "599MiB", "1e3GiB", "GiB", "8GiB\n", "٨GiB", "$8GiB"]


@pytest.mark.parametrize("text", [*AMOUNTS, *NONE])
def test_a_limit_is_an_amount_of_memory(text):
    with contextlib.nullcontext() if text in AMOUNTS else pytest.raises(UsageError, match="--memory"):
        assert AMOUNTS.get(text) == resources.parse_memory(text)


@pytest.mark.parametrize(
    ("requested", "num_tasks", "fits"), [("8GiB", 3, False), ("6826MiB", 3, True), ("", 31, False), ("", 30, True)]
)
def test_only_what_fits_into_the_engine_s_machine_is_accepted(monkeypatch, requested, num_tasks, fits):
    monkeypatch.setattr(engine, "memory_bytes", lambda: 20 * GIB)
    with contextlib.nullcontext() if fits else pytest.raises(PrerequisiteError):
        Compose().memory(requested, num_tasks).check(num_tasks)


def with_memory(total: str) -> str:
    """Return the script of a `docker` whose machine has so much memory."""
    return WORKING_ENGINE.replace("info)", f'info) case "$*" in *MemTotal*) echo {total}; exit;; esac;', 1)


def test_a_container_s_limit_is_of_the_engine_s_machine(resolved, docker):
    docker(with_memory(str(20 * GIB)))
    tasks = planning.plan(Request(name="one", workers=2)).compose["services"].values()
    assert [(6 * GIB, 6 * GIB)] * 3 == [(task["mem_limit"], task["memswap_limit"]) for task in tasks]
    with pytest.raises(PrerequisiteError, match="--memory 8GiB"):
        startup.check_machine(planning.plan(Request(name="one", workers=2, memory="8GiB")))


@pytest.mark.parametrize("total", ["0", "unknown", "", "-1"])
def test_an_engine_that_does_not_report_is_on_this_machine(docker, total):
    docker(with_memory(total))
    assert machine.total_bytes() == engine.memory_bytes() > machine.available_bytes()


def test_a_run_keeps_its_limit_and_another_number_of_tasks_shares_again(resolved, make_run, docker):
    docker(with_memory(str(20 * GIB)))
    run = make_run(workers=2)
    write_json(run.summary, {"state": "stopped"})

    def resumed(**requested: str) -> int:
        return planning.plan(Request(resume="run", runtime="docker", trust=True, **requested)).memory.task_bytes

    assert (6 * GIB, 18 * GIB) == (resumed(), resumed(workers=0))
    write_json(run.control / "started.json", read_json(run.control / "started.json") | {"memory": "5GiB"})
    assert (5 * GIB, 5 * GIB, 4 * GIB) == (resumed(), resumed(workers=0), resumed(memory="4GiB"))
    assert Memory("5GiB") == planning.plan(Request(resume="run", runtime="local", trust=True)).memory


V2 = {
    "memory.max": f"{4 * GIB}\n",
    "memory.current": f"{3 * GIB}\n",
    "memory.stat": f"anon 7\ninactive_file {GIB}\nactive_file 9\n",
    "memory.events": "low 0\nhigh 0\nmax 12\noom 2\noom_kill 2\noom_group_kill 0\n",
}
V1 = {
    "memory/memory.limit_in_bytes": V2["memory.max"],
    "memory/memory.usage_in_bytes": V2["memory.current"],
    "memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
    "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
}


def job(controller: str, line: str) -> dict[str, str]:
    """Return the files of a step of a job that has the limit; the headroom is that of all jobs."""
    inside = {name.removeprefix("memory/"): text for name, text in (V1 if controller else V2).items()}
    (limit, most), (used, _), *_ = inside.items()
    found = {f"{controller}jobs/7/step/{name}": text for name, text in inside.items() if name != limit}
    jobs = {f"{controller}jobs/{limit}": f"{9 * GIB}", f"{controller}jobs/{used}": f"{7 * GIB}"}
    return found | jobs | {f"{controller}jobs/7/{limit}": most, "own": f"{line}/jobs/7/step\n"}


@pytest.fixture
def kernel(tmp_path, monkeypatch) -> Callable[[dict[str, str]], None]:
    """Have the kernel report this of the container that the test is in."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "cgroup" / "own")

    def tell(found: dict[str, str]) -> None:
        for name, text in found.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return tell


@pytest.mark.parametrize(
    "files",
    [V2, V1, job("", "0::"), job("memory/", "5:cpu,memory:"), {}, {"memory.max": "max\n"}],
    ids=["v2", "v1", "job of v2", "job of v1", "none", "no limit"],
)
def test_limit_room_and_kills_are_the_kernel_s(kernel, files):
    kernel(files)
    if len(files) > 1:
        assert (4 * GIB, 2 * GIB, 2) == (machine.limit_bytes(), machine.headroom_bytes(), machine.kills())
    else:
        assert (True, 0) == (machine.headroom_bytes() > 2**60, machine.kills())


def test_local_tasks_must_fit_into_the_limit_of_the_container_that_they_run_in(kernel, monkeypatch):
    kernel(V2)
    monkeypatch.setattr(machine, "available_bytes", lambda: 64 * GIB)
    resources.check_free_memory(3)
    with pytest.raises(PrerequisiteError):
        resources.check_free_memory(4)


@pytest.mark.parametrize(
    ("free", "files", "short"),
    [
        (2 * GIB, V2, False),
        (2**29, V2, True),
        (2 * GIB, V2 | {"memory.max": f"{2 * GIB}\n"}, True),
        (2 * GIB, V2 | {"memory.pressure": "some avg10=4.90 avg60=0.00\n"}, False),
        (2 * GIB, V2 | {"memory.pressure": "some avg10=5.10 avg60=0.00\n"}, True),
    ],
)
def test_memory_is_short_where_little_is_left_or_it_is_waited_for(kernel, monkeypatch, tmp_path, free, files, short):
    kernel(files)
    monkeypatch.setattr(machine, "PRESSURE", tmp_path / "none")
    monkeypatch.setattr(machine, "available_bytes", lambda: free)
    assert short == machine.is_short()


@pytest.mark.parametrize(
    ("code", "kills", "standby_kills", "kind", "cause"),
    [
        (-9, 3, 0, attempt_limits.PROGRAM_FAILURE, "killed for memory"),
        (-9, 4, 1, attempt_limits.PROGRAM_FAILURE, "killed for memory"),
        (-9, 3, 1, attempt_limits.EXTERNAL, "exit code 137"),  # that was the standby process
        (-9, 2, 0, attempt_limits.EXTERNAL, "exit code 137"),
        (-11, 3, 0, attempt_limits.PROGRAM_FAILURE, "exit code 139"),
    ],
)
def test_an_agent_reports_whether_memory_killed_its_program(
    make_run, kernel, monkeypatch, code, kills, standby_kills, kind, cause
):
    kernel(V2)
    attempt = Agent(RunView(make_run(workers=0)), "chief", [], 1.0)._attempt_in(0)
    kernel({"memory.events": f"oom_kill {kills}\n"})
    monkeypatch.setattr(standby.Standby, "kills", standby_kills)
    end = attempt._end_of(SimpleNamespace(pid=0, error=lambda code: None), code)
    assert (kind, None, True) == (end.kind, end.error, end.cause.startswith(cause))
