"""The published model that `paceline fetch smollm2` fetches, once for all runs: it is kept in the user's own cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.core.errors import DownloadError
from paceline.fetch import fetch_model

# Before the tests' own cache takes its place: 93 MB are not downloaded in every run.
_CACHE = os.environ.get("PACELINE_CACHE")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Its folder. Tests that need it are skipped where it is neither in the cache nor in the index, with the reason."""
    with pytest.MonkeyPatch.context() as patch:
        if _CACHE:
            patch.setenv("PACELINE_CACHE", _CACHE)
        else:
            patch.delenv("PACELINE_CACHE", raising=False)
        try:
            return fetch_model("smollm2")
        except DownloadError as error:
            pytest.skip(str(error))
