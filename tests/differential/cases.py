"""Trains cases with our training program and with plain Keras.

python -m tests.differential.cases FOLDER SEED ...         prints what came out of each as JSON

With ONEDNN=off for cases in half precision, as `up` decides.
"""

import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from cluster.host.launch.plan import AVX512, processor_flags
from train.config import TrainConfig
from train.startup import preload

KERNELS = os.environ.get("ONEDNN") or ("avx512" if AVX512 <= processor_flags() else "avx2")
preload.set_variables(TrainConfig(onednn=KERNELS), "one")  # as `up` decides for these models

from cluster.contract.run.folder import RunFolder  # noqa: E402
from cluster.system import fork_server  # noqa: E402
from cluster.system.errors import UsageError  # noqa: E402
from tests.differential import trainer  # noqa: E402
from tests.differential.draw import CANCELLED, Case, twin  # noqa: E402
from tests.differential.refused import REFUSALS, parsed  # noqa: E402
from tests.differential.source import write  # noqa: E402

LOSSES, EVALUATIONS, WEIGHTS, OPTIMIZER, HALF = 1e-6, 1e-5, 1e-4, 1e-2, 0.2
"""How far apart, relatively, numbers may be from those of plain Keras; in half precision all of them."""
ADAPTIVE = {"weights": 1e-3, "losses": 1e-5, "evaluations": 1e-4}
"""Bounds under optimizers that divide a gradient by its size."""


def load() -> None:
    """Import what all forks need."""
    import train.__main__
    import train.data.__main__
    import train.startup.model_checks
    import train.startup.preflight  # noqa: F401
    from train import program  # noqa: F401


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Train a case with our program and with plain Keras, and its twin; return the comparison."""
    name, began, other = f"case_{case.seed}", time.monotonic(), twin(case)
    file = folder / f"{name}.py"
    file.write_text(write(case))
    try:
        whole = trainer.start(trainer.plan(case, name, name))
        if other == case:
            again = RunFolder(whole.path.with_name(f"{name}_twin"))
            shutil.copytree(whole.path, again.path)
        else:
            again = other and trainer.start(trainer.plan(other, name, f"{name}_twin"))
    except UsageError as error:
        return {"refused": str(error)}
    try:
        trainer.train(whole, case.killed_at if case.strategy == "ps" else ())
        if again:
            trainer.train(again, case.killed_at)
    except trainer.Failed as error:
        return {"failed": str(error)}
    words = [str(file), str(whole.path), str(folder / f"{name}.json"), *([str(again.path)] if again else [])]
    log = folder / f"{name}.log"
    process = trainer.run_module([sys.executable, "-m", "tests.differential.compare", *words], log, os.environ)
    if process.wait(timeout=trainer.LIMIT_S):
        return {"failed": trainer.tail(log)}
    return json.loads((folder / f"{name}.json").read_text()) | {"seconds": round(time.monotonic() - began, 1)}


def problems(case: Case, found: dict[str, Any]) -> list[str]:
    """Return the errors in the comparison of a case."""
    expected = [refusal.what for refusal in REFUSALS if refusal.applies(case)]
    if "refused" in found:
        return [] if expected else [f"refused, which docs/internals/differential.md does not list: {found['refused']}"]
    if expected:
        return [f"was not refused, as docs/internals/differential.md says: {expected[0]}"]
    if "failed" in found:
        return [found["failed"]]
    half = case.precision != "fp32"
    bounds = {"losses": LOSSES, "weights": WEIGHTS, "optimizer": OPTIMIZER, "evaluations": EVALUATIONS}
    bounds |= {} if case.optimizer == "sgd" else ADAPTIVE
    wrong = [f"other bits than its twin: {', '.join(found['bits'][:5])}"] if found["bits"] else []
    for name, value in found.items():
        if name == "weights" and case.optimizer != "sgd" and "batch_norm" in case.layers:
            value = {path: difference for path, difference in value.items() if path not in CANCELLED}  # noqa: PLW2901
        apart = max(value.values(), default=0.0) if isinstance(value, dict) else value
        if name.startswith(("losses", "scores", "eval", "weights", "optimizer", "exports")):
            bound = (
                HALF if half else bounds.get("evaluations" if name.startswith(("eval", "exports")) else name, LOSSES)
            )
            if not apart <= bound:
                worst = max(value, key=value.get) if isinstance(value, dict) else name
                wrong.append(f"{name}: {worst} is {apart:.1e} apart, relatively; expected at most {bound:g}")
    return wrong


def attempt(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case in a fresh folder; an error of ours is a failure of the case."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    try:
        return run(case, folder)
    except Exception:
        return {"failed": traceback.format_exc()}


def main(folder: Path, words: list[str]) -> None:
    """Run cases, and print what came out of each."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {"RUNS_DIR": str(folder / "runs"), "DATA_DIR": str(folder / "data"), "CUDA_VISIBLE_DEVICES": "-1"}
    os.environ |= {"PYTHONPATH": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    sys.path.insert(0, str(folder))  # forks do not read PYTHONPATH
    fork_server.preload("tests.differential.cases")
    trainer.use_forks()
    os.fsync = lambda _descriptor: None  # a busy disk would take most of the time
    for word in words:
        case = parsed(word)
        found = attempt(case, folder)
        wrong = problems(case, found)
        program = (folder / f"case_{case.seed}.py").read_text() if wrong else ""
        print(json.dumps({"case": word, "wrong": wrong, "program": program, **found}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
