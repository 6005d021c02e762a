"""Complete run folders, and damage to them as by a power failure, a careless user or a hostile task."""

import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.contract.run.records import Pace
from cluster.host.runtime.local_runtime import processes_of
from cluster.system.json_files import append_json, write_json
from cluster.system.processes import identity
from tests.support.beats import LEDGER

ABSENT_PID = 2**22 - 1

HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**80, -(2**80), 1.5, -1.5, 1e308, -1e308, 5e-324,
    float("nan"), float("inf"), -float("inf"), "", "x", "\x1b[2J\x07", "\ud800", "\0", "../../..", "/", "-1", "chief",
    "training", "docker", "9" * 5000, "x" * 100_000, [], [[]], [None], {}, {"": None}, {"x": {"x": []}},
]  # fmt: skip
"""Unexpected values for a field of a record."""

TEXTS = [
    b"", b" ", b"\n", b"x", b"[]", b"{}", b"null", b"3", b'"', b"{" * 10, b"[" * 100_000, b'{"a":' * 100_000,
    b"\xff\xfe\x00", b"\x00" * 4096, "{}".encode("utf-16"), b"NaN", b"[" * 900 + b"]" * 900, b"1" * 5000,
]  # fmt: skip
"""Unexpected contents of a file."""


def fill(run: RunFolder) -> None:
    """Fill a run folder as after a run with a failure, a checkpoint and a trace."""
    now, spec = time.time(), run.load_cluster()
    write_json(run.compose, processes_of(spec, run.path, run.path.parent / "data", []))
    write_json(run.manifest, {"schema": 1, "run": run.name, "runtime": "local", "config": {"global_batch": 96}})
    write_json(run.environment, {"python": "3.11"})
    write_json(run.control / "data.json", {"version": "3.0.1", "num_shards": 1})
    why = {"task": "worker-0", "cause": "exit code 137", "error": None, "failed_at": now - 5, "step": 3}
    run.event("chief", "first step", step=1)
    run.event("chief", "checkpoint", step=3)
    run.begin_generation(1, **why)
    run.event("worker-0", "gang restart", step=3, cause="exit code 137", error=None)
    run.event("chief", "restored", step=3)
    run.event("chief", "first step", step=4)
    run.event("worker-0", "restarted", step=4, cause="exit code 137", error=None, failed_at=now)
    run.event("worker-0", "resumed", step=4)
    run.event("chief", "fault", step=4, kind="kill", whole=False)
    for task in spec.tasks:
        pace = {"step_ms": {"mean": 9.0, "median": 9.0}, "busy_share": 0.9, "input_share": 0.1}
        beat = HeartbeatWriter(run, task, generation=1)
        beat.update(state="done", step=9, loss=0.5, examples_per_s=100.0, steps_total=9, **pace, pace=Pace(**pace))
        beat.update(exit_code=0, ended=True)
        beat.write()
        for step in range(1, 10):
            append_json(run.metrics(task.name), {"step": step, "loss": 1 / step, "examples_per_s": 9.0, "time": now})
        run.log(task.name).write_text("step 1\nstep 2\n")
        write_json(run.programs(task.name), {"agent": identity(ABSENT_PID), "program": identity(ABSENT_PID)})
    recorded = LEDGER | {"generation": 1, "began": now, "first_step_at": now, "updated_at": now}
    write_json(run.ledger(1), recorded | {"first": 3, "step": 9, "timed_steps": 5})
    write_json(run.control / "result.json", {"steps": 9, "metrics": {"eval_accuracy": 0.9}, "weights_sha256": "ab"})
    write_json(run.checkpoints / "ckpt-3.json", {"step": 3, "files": {"ckpt-3.index": {"size_bytes": 1}}})
    (run.checkpoints / "ckpt-3.index").write_bytes(b"x")
    write_json(run.trace_request, {"id": "1", "task": "chief", "steps": 5, "until": now + 60})
    write_json(run.trace_answer, {"id": "1", "task": "chief", "first": 1, "last": 5})
    write_json(run.control / "supervisor.json", identity(ABSENT_PID))
    write_json(run.control / "withdrawn.json", {"generation": 0})
    append_json(run.path / "chaos.jsonl", {"kind": "kill"})


def copy(run: RunFolder, folder: Path) -> RunFolder:
    shutil.copytree(run.path, folder, symlinks=True)
    return RunFolder(folder)


def files_of(run: RunFolder) -> list[str]:
    return sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file())


def damage(run: RunFolder, name: str, draw: random.Random, outside: Path) -> str:
    """Damage one file of a run at random; return a description of the damage."""
    path = run.path / name
    kind = draw.choice([tear, empty, lengthen, replace, mistype, mistype, mistype, misplace, hide, add])
    damages = kind in (misplace, hide, add) or (path.is_file() and not path.is_symlink())
    if damages and os.path.lexists(path) and not path.parent.is_symlink():  # else it would damage the link's target
        kind(path, draw, outside)
    return f"{kind.__name__} {name}"


def tear(path: Path, draw: random.Random, outside: Path) -> None:
    os.truncate(path, draw.randint(0, path.stat().st_size))


def empty(path: Path, draw: random.Random, outside: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path, draw: random.Random, outside: Path) -> None:
    """Append to a file: garbage, itself, or more zeros than there is memory."""
    with path.open("ab") as file:
        if draw.random() < 0.2:
            file.truncate(10**11)
        else:
            file.write(draw.choice([draw.randbytes(100), b"}", b"\x1b[2J\n", b"x" * 10**6, b"{}\n[]\n3\n"]))


def replace(path: Path, draw: random.Random, outside: Path) -> None:
    path.write_bytes(draw.choice([*TEXTS, json.dumps(draw.choice(HOSTILE)).encode()]))


def mistype(path: Path, draw: random.Random, outside: Path) -> None:
    """Change, remove or add a value somewhere in a record, or in a line of it."""
    if path.stat().st_size > 10**6:
        return
    try:
        if path.suffix != ".jsonl":
            path.write_text(json.dumps(_mistyped(json.loads(path.read_bytes()), draw)))
            return
        lines = path.read_text().splitlines()
        at = draw.randrange(len(lines))
        lines[at] = json.dumps(_mistyped(json.loads(lines[at]), draw))
        path.write_text("\n".join(lines) + "\n")
    except (ValueError, RecursionError):
        replace(path, draw, outside)


def _mistyped(value: Any, draw: random.Random) -> Any:
    names = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not names or draw.random() < 0.1:
        return draw.choice(HOSTILE)
    name = draw.choice(names)
    how = draw.random()
    if how < 0.4:
        value[name] = draw.choice(HOSTILE)
    elif how < 0.5 and isinstance(value, dict):
        del value[name]
    elif how < 0.6 and isinstance(value, dict):
        value[draw.choice(["x", "", "\x1b[2J", "chief"])] = draw.choice(HOSTILE)
    else:
        value[name] = _mistyped(value[name], draw)
    return value


def misplace(path: Path, draw: random.Random, outside: Path) -> None:
    """Put something other than a file in a file's place, or in that of its folder."""
    if draw.random() < 0.2 and path.parent.parent.name != "runs" and path.parent.name != "runs":
        path = path.parent
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    target = draw.choice(["fifo", "folder", "itself", "nothing", "outside", "file"])
    if target == "fifo":
        os.mkfifo(path)
    elif target == "folder":
        (path / "inside").mkdir(parents=True)
    elif target == "file":
        path.write_bytes(b"x")
    else:
        path.symlink_to({"itself": path.name, "nothing": "nowhere", "outside": outside}[target])


def hide(path: Path, draw: random.Random, outside: Path) -> None:
    if path.is_file() or path.is_symlink():
        path.unlink()


def add(path: Path, draw: random.Random, outside: Path) -> None:
    if path.parent.is_dir() and not path.parent.is_symlink():
        name = draw.choice(["zzz.json", "-1.json", "².json", "1e9.json", f"{'9' * 200}.json", "\x1b[2J.json", ".json"])
        (path.parent / f"ckpt-{name}").write_bytes(draw.choice(TEXTS))
        (path.parent / name).write_bytes(draw.choice(TEXTS))
