"""`WorkerConfig`: how a worker's process loads its model, read from the plain settings that cross processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.auto import AutoDecoder, SamplingDecoder
from paceline.config import SpeculativeConfig


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings that a target's worker and a draft's worker share.

    folder       checkpoint of the model
    amp, batch_size, n_positions, backend, tp_degree, group_query_attention   as in `AutoDecoder.from_pretrained`
    speculative  of a target: who drafts in its process, and how it decodes; of a draft: its k
    draft_ahead  the draft works while its target verifies
    """

    folder: Path
    amp: str
    batch_size: int
    n_positions: int
    backend: str
    draft_ahead: bool = False
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    tp_degree: int = 1
    group_query_attention: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None

    @classmethod
    def from_settings(cls, settings: Mapping[str, object]) -> WorkerConfig:
        """Read the settings of a worker; keys that only one kind of worker has are left to it.

        Raises:
            ConfigurationError: the keys of `SpeculativeConfig` contradict each other.
        """
        layout, quantization = settings.get("group_query_attention"), settings.get("quantization")
        cached = settings.get("kv_cache_dtype")
        return cls(
            folder=Path(str(settings["folder"])),
            amp=str(settings["amp"]),
            batch_size=int(str(settings["batch_size"])),
            n_positions=int(str(settings["n_positions"])),
            backend=str(settings["backend"]),
            draft_ahead=bool(settings.get("draft_ahead", False)),
            speculative=SpeculativeConfig(**{k: settings[k] for k in SpeculativeConfig.model_fields if k in settings}),
            tp_degree=int(str(settings.get("tp_degree", 1))),
            group_query_attention=None if layout is None else str(layout),
            quantization=None if quantization is None else str(quantization),
            kv_cache_dtype=None if cached is None else str(cached),
        )

    def load(self) -> SamplingDecoder:
        """The model of this worker."""
        return AutoDecoder.from_pretrained(
            self.folder,
            batch_size=self.batch_size,
            n_positions=self.n_positions,
            amp=self.amp,
            backend=self.backend,
            tp_degree=self.tp_degree,
            group_query_attention=self.group_query_attention,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
        )
