"""From the options of a command to a generator, with a progress bar while weights are read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.auto import AutoDecoder, SamplingDecoder
from paceline.auto_drafter import load_draft_models
from paceline.cli import console, progress
from paceline.cli.options import LoaderOptions
from paceline.config import SpeculativeConfig
from paceline.decoder.decoder import CompiledDecoder
from paceline.generator import SpeculativeGenerator


def load_decoder(path: str | Path, **options: Any) -> SamplingDecoder:
    """`AutoDecoder.from_pretrained` with a bar."""
    with progress.loading(console.err(), Path(path)) as report:
        return AutoDecoder.from_pretrained(path, progress=report, **options)


def load_target(folder: Path, options: LoaderOptions) -> SamplingDecoder:
    """The target of a command."""
    return load_decoder(folder, **asdict(options))


def load_generator(
    target: Path, options: LoaderOptions, config: SpeculativeConfig
) -> tuple[SpeculativeGenerator, dict[str, CompiledDecoder]]:
    """A generator, and its decoders by the names to show.

    Without a draft and without ``k`` every plain step is a graph of its own.
    """
    return load_draft(load_target(target, options), config)


def load_draft(
    decoder: SamplingDecoder, config: SpeculativeConfig
) -> tuple[SpeculativeGenerator, dict[str, CompiledDecoder]]:
    """The same of a target that is there."""
    config = load_draft_models(config, decoder, load_decoder)
    if not config.draft and config.k is None:
        config = config.model_copy(update={"k": 0})
    generator = SpeculativeGenerator(target=decoder, **dict(config))
    drafts = generator.decoders[1:]
    names = ["draft"] if len(drafts) == 1 else [f"draft {number}" for number in range(1, len(drafts) + 1)]
    return generator, {"target": decoder, **dict(zip(names, drafts, strict=True))}
