"""These tests need torch_mlir, which has an environment of its own (`make test-xla`); elsewhere none is collected."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch_mlir") else ["test_*.py"]
