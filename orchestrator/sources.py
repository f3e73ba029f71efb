"""From the options of a command to what generates: which decoders are loaded, who drafts, what stands.

Not here: the options themselves (`paceline.cli`) and what is done with the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline import console, progress
from paceline.auto import AutoDecoder, SamplingDecoder
from paceline.build import DraftLike
from paceline.core.errors import ConfigurationError
from paceline.eagle import spec
from paceline.eagle.drafter import EagleDrafter
from paceline.generator import SpeculativeGenerator
from paceline.medusa.drafter import MedusaDrafter

Source = SpeculativeGenerator | SamplingDecoder


@dataclass(frozen=True, slots=True)
class Loading:
    """Options every decoder of a command is loaded with."""

    backend: str
    amp: str
    n_positions: int | None
    chunks: list[int] | None
    batch_size: int = 1

    def decoder(self, folder: Path) -> SamplingDecoder:
        """Load one, with a bar."""
        with progress.loading(console.err(), folder) as report:
            return AutoDecoder.from_pretrained(
                folder,
                batch_size=self.batch_size,
                n_positions=self.n_positions,
                context_length_estimate=self.chunks,
                amp=self.amp,
                backend=self.backend,
                progress=report,
            )


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who drafts, as the options say it, and which drafts stand."""

    k: int
    draft: Path | None = None
    ngram: bool = False
    medusa: Path | None = None
    tree: Path | None = None
    acceptor: str = "match"
    eagle: Path | None = None
    growth: str | None = None

    def check(self) -> None:
        """Raise ConfigurationError if the options contradict each other."""
        asked = {"--draft": self.draft, "--ngram": self.ngram, "--medusa": self.medusa, "--eagle": self.eagle}
        given = [name for name, value in asked.items() if value]
        if len(given) > 1:
            raise ConfigurationError(f"{' and '.join(given)} exclude each other; give one of them")
        if self.tree and not self.medusa:
            raise ConfigurationError("--tree is the tree of Medusa heads; give their folder with --medusa")
        if self.growth and not self.eagle:
            raise ConfigurationError("--growth is how drafts of an EAGLE head grow; give its folder with --eagle")
        if self.acceptor != "match" and not given:
            raise ConfigurationError("--acceptor needs a drafter: give --draft, --ngram, --medusa or --eagle")


def source_of(target: Path, options: Loading, how: Drafting) -> tuple[Source, dict[str, SamplingDecoder]]:
    """What generates, and the decoders it is made of by the name to show."""
    how.check()
    decoders = {"target": options.decoder(target)}
    drafter: DraftLike = "ngram" if how.ngram else None
    if how.draft:
        drafter = decoders["draft"] = options.decoder(how.draft)
    if how.medusa:
        drafter = MedusaDrafter.from_pretrained(how.medusa, decoders["target"], tree=how.tree)
    if how.eagle:
        growth = spec.growth(how.growth or "chain", k=how.k, drawn=how.acceptor == "reject")
        drafter = EagleDrafter.from_pretrained(how.eagle, decoders["target"], growth)
    if drafter is None:
        return decoders["target"], decoders
    return SpeculativeGenerator(drafter, decoders["target"], k=how.k, acceptor=how.acceptor), decoders
