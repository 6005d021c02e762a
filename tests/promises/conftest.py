"""Fixtures of the promises: those of the scenarios, and a configuration that planning takes as resolved."""

from tests.e2e.conftest import clusters, data, defaults, environment, images
from tests.unit.conftest import resolved

__all__ = ["clusters", "data", "defaults", "environment", "images", "resolved"]
