"""The golden losses of the presets: what their first steps give, kept in `tests/golden/PRESET.json`.

A change of numerics, ours or of a newer library, shows in `make test`. `invoke golden` alone renews them:

    python -m tests.golden.losses
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import read_json, write_json
from tests.e2e.scenario import Clusters, summary

FOLDER = Path(__file__).parent
PRESETS = ("fashion_mnist",)
"""Those whose data can be got anywhere. `mnist` is the same but for its data (`tests/unit/train/test_config.py`)."""

STEPS, THREADS = 20, 2


def train(clusters: Clusters, preset: str) -> RunFolder:
    """Train a preset's first steps on the chief alone, with as many threads on any machine."""
    words = f"--preset={preset} --workers=0 -- --global-batch 192 --max-steps {STEPS} --threads {THREADS}"
    return clusters.up(f"golden-{preset}", words)


def describe(run: RunFolder) -> dict[str, Any]:
    """Return the recorded losses of a run, and its environment, on which the bits also depend."""
    environment = read_json(run.environment)
    kept = {name: environment[name] for name in ("cpu", "packages")}
    kept["threads"] = environment["threads"]["intra_op"]
    return {**kept, "losses": list(run.losses().values()), "weights_sha256": summary(run)["weights_sha256"]}


def path_of(preset: str) -> Path:
    return FOLDER / f"{preset}.json"


def main() -> None:
    """Renew the golden losses of every preset, and say by how much they changed."""
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        for preset in PRESETS:
            found = describe(train(Clusters(Path(folder)), preset))
            before = read_json(path_of(preset), {"losses": found["losses"]})["losses"]
            write_json(path_of(preset), found)
            apart = max(abs(new / old - 1) for new, old in zip(found["losses"], before, strict=True))
            print(json.dumps({"preset": preset, "steps": STEPS, "largest_relative_change": apart}))


if __name__ == "__main__":
    main()
