"""The first losses of every preset are those that were recorded; `invoke golden` records them anew."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.system.json_files import read_json
from tests.e2e.scenario import Clusters
from tests.golden import losses as golden

pytestmark = pytest.mark.usefixtures("data")

RELATIVE = 2e-4
"""What another kind of processor may change in 20 steps: its kernels add up in another order."""


@pytest.mark.parametrize("preset", golden.PRESETS)
def test_the_first_losses_must_be_the_golden_ones(clusters: Clusters, preset: str) -> None:
    """Bit for bit on the processor and the packages that they were recorded with, otherwise nearly."""
    expected = read_json(golden.path_of(preset))
    found = golden.describe(golden.train(clusters, preset))
    assert golden.THREADS == found["threads"]
    if all(expected[name] == found[name] for name in ("cpu", "packages")):
        assert expected == found
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=RELATIVE)
