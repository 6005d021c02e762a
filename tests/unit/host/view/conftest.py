"""A run that is shown."""

import pytest

from cluster.contract.run.folder import RunFolder


@pytest.fixture
def run(make_run) -> RunFolder:
    return make_run("demo", workers=1)
