"""The tiny pair that stands in for the demo's."""

from tests.cli.conftest import home

__all__ = ["home"]
