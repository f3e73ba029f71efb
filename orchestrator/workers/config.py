"""`WorkerConfig`: how a worker's process loads its model, read from the plain settings that cross processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.auto import SamplingDecoder, load
from paceline.config import SpeculativeConfig
from paceline.decoder.options import LoadOptions
from paceline.loadable import loadable


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings common to a target's worker and a draft's worker.

    folder       checkpoint of the model
    options      how the model is loaded
    speculative  for a target: the drafters in its process, and how it decodes; for a draft: its k
    draft_ahead  asynchronous drafting: the draft model drafts while its target verifies
    """

    folder: Path
    options: LoadOptions
    draft_ahead: bool = False
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    @classmethod
    def from_settings(cls, settings: Mapping[str, object]) -> WorkerConfig:
        """Read the settings of a worker; keys of only one kind of worker are ignored."""
        return cls(
            folder=Path(str(settings["folder"])),
            options=LoadOptions.part_of(settings),
            draft_ahead=bool(settings.get("draft_ahead", False)),
            speculative=SpeculativeConfig.part_of(settings),
        )

    def load(self) -> SamplingDecoder:
        return load(loadable(self.folder, self.options))
