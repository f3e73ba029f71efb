"""Write hidden states with speculators' own connector for vLLM. Run by an interpreter that has speculators: OUT.

vLLM is not there: of its module, the connector needs the base class alone to write a file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

BASE = "vllm.distributed.kv_transfer.kv_connector.v1"
base = ModuleType(BASE)
base.example_hidden_states_connector = SimpleNamespace(ExampleHiddenStatesConnector=object)  # type: ignore[attr-defined]
sys.modules[BASE] = base

from hs_connectors.fp8_hidden_states_connector import FP8HiddenStatesConnector  # noqa: E402

tensors = {
    "token_ids": torch.arange(5, 17),
    "hidden_states": torch.randn(12, 4, 32, generator=torch.Generator().manual_seed(0)),
}
done = SimpleNamespace(synchronize=lambda: None)
FP8HiddenStatesConnector._write_tensors(tensors, done, str(Path(sys.argv[1])), None)
