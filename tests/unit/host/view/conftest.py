"""A run that is shown."""

from __future__ import annotations

import pytest

from cluster.contract.run.folder import RunFolder
from tests.unit.beats import MakeRun


@pytest.fixture
def run(make_run: MakeRun) -> RunFolder:
    return make_run("demo", workers=1)
