"""The only place that reads environment variables.

PACELINE_CACHE  folder of compiled artefacts; default ~/.cache/paceline
CXX             the C++ compiler; default g++
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """Folder of compiled artefacts. What lies in it is loaded as code: keep it writable by its owner alone."""
    return Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline")


def compiler() -> str:
    """The C++ compiler."""
    return os.environ.get("CXX") or "g++"
