"""From the options of a command to a generator, with a progress bar while weights are read.

Everything that configurations and options say is checked by `checked`, before PyTorch is imported.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import console, progress
from paceline.cli.options import LoaderOptions
from paceline.config import SpeculativeConfig
from paceline.draft_checks import prepared
from paceline.loadable import Loadable, loadable

if TYPE_CHECKING:
    from paceline.auto import SamplingDecoder
    from paceline.decoder.decoder import CompiledDecoder
    from paceline.generator import SpeculativeGenerator


def checked(target: Path, options: LoaderOptions, config: SpeculativeConfig | None = None) -> Loadable:
    """The target of a command, which can be loaded, with the drafters that are asked for; errors as `prepared`."""
    found = loadable(target, **asdict(options))
    if config is not None:
        prepared(config, found)
    return found


def load(found: Loadable) -> SamplingDecoder:
    """`paceline.auto.load` with a bar."""
    from paceline import auto

    assert found.folder is not None, "of a file"
    with progress.loading(console.err(), found.folder) as report:
        return auto.load(found, report)


def load_decoder(path: str | Path, **options: Any) -> SamplingDecoder:
    """`AutoDecoder.from_pretrained` with a bar."""
    return load(loadable(path, **options))


def load_generator(
    target: Loadable, config: SpeculativeConfig
) -> tuple[SpeculativeGenerator, dict[str, CompiledDecoder]]:
    """A generator, and its decoders by the names to show.

    Without a draft and without ``k`` every plain step is a graph of its own.
    """
    return load_draft(load(target), config)


def load_draft(
    decoder: SamplingDecoder, config: SpeculativeConfig
) -> tuple[SpeculativeGenerator, dict[str, CompiledDecoder]]:
    """The same of a target that is there."""
    from paceline.auto_drafter import load_draft_models
    from paceline.generator import SpeculativeGenerator

    config = load_draft_models(config, decoder, load)
    if not config.draft and config.k is None:
        config = config.model_copy(update={"k": 0})
    generator = SpeculativeGenerator(target=decoder, **dict(config))
    drafts = generator.decoders[1:]
    names = ["draft"] if len(drafts) == 1 else [f"draft {number}" for number in range(1, len(drafts) + 1)]
    return generator, {"target": decoder, **dict(zip(names, drafts, strict=True))}
