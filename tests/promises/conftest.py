"""Fixtures of the promises: those of the e2e scenarios, and a configuration that planning regards as resolved."""

from tests.e2e.conftest import clusters, data, defaults, environment, images
from tests.unit.conftest import resolved

__all__ = ["clusters", "data", "defaults", "environment", "images", "resolved"]
