"""These tests need torch_mlir, which has a separate environment (`make test-xla`); without it none is collected."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch_mlir") else ["test_*.py"]
