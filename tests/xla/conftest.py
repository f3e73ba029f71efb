"""These tests need torch_xla, which has an environment of its own (`make test-xla`); elsewhere none is collected."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch_xla") else ["test_*.py"]
