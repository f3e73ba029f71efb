"""Models to plan with, of sizes a test chooses; no tests."""

from __future__ import annotations

from paceline.decoder.models.config import ModelConfig, RopeConfig
from paceline.decoder.options import LoadOptions
from paceline.placement.planning.model_specs import ModelSpec


def config(*, heads: int = 48, layers: int = 2, hidden: int = 96, vocab: int = 64, kv: int = 1) -> ModelConfig:
    return ModelConfig(
        "llama", vocab, hidden, 2 * hidden, layers, heads, kv, 8, 1e-6, 4096, RopeConfig(), False, False, False, "silu",
        (), None, None,
    )  # fmt: skip


def model(
    name: str,
    degree: int | None = 1,
    *,
    of: ModelConfig | None = None,
    draft_of: tuple[str, ...] = (),
    replicas: int = 1,
    batch: int = 1,
    backend: str = "native",
) -> ModelSpec:
    shape = LoadOptions(batch_size=batch, n_positions=128, backend=backend)
    made = of or config(heads=192)
    return ModelSpec(name, made, None, shape, degree, draft_of=draft_of, replicas=replicas)
