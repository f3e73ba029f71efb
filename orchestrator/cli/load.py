"""From the options of a command to what generates: which decoders are loaded, who drafts, what stands.

Not here: the options themselves (`paceline.cli.options`) and what is done with the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.auto import AutoDecoder, SamplingDecoder
from paceline.build import DraftLike, OneDraft
from paceline.cli import console, progress
from paceline.core.errors import ConfigurationError
from paceline.eagle import spec
from paceline.eagle.drafter import EagleDrafter
from paceline.engine.draft_length import DRAFT_LENGTHS
from paceline.generator import SpeculativeGenerator
from paceline.medusa.drafter import MedusaDrafter

Source = SpeculativeGenerator | SamplingDecoder

DEPTH = 4
"""Drafted tokens per round, where nothing else says how many."""


@dataclass(frozen=True, slots=True)
class Loading:
    """Options every decoder of a command is loaded with."""

    backend: str
    amp: str
    n_positions: int | None = None
    chunks: list[int] | None = None
    batch_size: int = 1
    tp_degree: int = 1
    group_query_attention: str | None = None

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
                tp_degree=self.tp_degree,
                group_query_attention=self.group_query_attention,
                progress=report,
            )


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who drafts, as the options say it, and which drafts stand. ``k``: None = not given."""

    k: str | None
    draft: Path | None = None
    ngram: bool = False
    medusa: Path | None = None
    tree: Path | None = None
    acceptor: str = "match"
    eagle: Path | None = None
    growth: str | None = None
    suffix: bool = False
    fused: bool | None = None
    exact: bool = True
    confidence: float = 0.0
    vocabulary: str = "same"
    synthetic_acceptance: float | None = None

    def check(self) -> None:
        """Raise ConfigurationError if the options contradict each other."""
        chains = {"--suffix": self.suffix, "--ngram": self.ngram, "--draft": self.draft}
        listed = [name for name, value in chains.items() if value]
        heads = [name for name, value in {"--medusa": self.medusa, "--eagle": self.eagle}.items() if value]
        if len(heads) > 1 or (heads and listed):
            raise ConfigurationError(
                f"{' and '.join([*listed, *heads])} exclude each other; heads draft alone, --suffix, --ngram and "
                "--draft may be combined"
            )
        if self.tree and not self.medusa:
            raise ConfigurationError("--tree is the tree of Medusa heads; give their folder with --medusa")
        if self.growth and not self.eagle:
            raise ConfigurationError("--growth is how drafts of an EAGLE head grow; give its folder with --eagle")
        for name, asked in (("confidence", self.confidence), ("vocabulary", self.vocabulary != "same")):
            if asked and not self.draft:
                raise ConfigurationError(f"--{name} is of a draft model; give its folder with --draft")
        asked_of_rounds = {
            "--k": self.k is not None,
            "--acceptor": self.acceptor != "match",
            "--synthetic-acceptance": self.synthetic_acceptance is not None,
            "--fused": self.fused,
        }
        for name, given in asked_of_rounds.items():
            if given and not (heads or listed):
                raise ConfigurationError(
                    f"{name} needs a drafter: give --draft, --ngram, --suffix, --medusa or --eagle"
                )

    def depths(self) -> int | tuple[int, ...]:
        """``k``: one number, or a ladder."""
        if self.k is None:
            return DEPTH
        if self.k == "auto":
            return DRAFT_LENGTHS
        try:
            numbers = tuple(int(part) for part in self.k.split(","))
        except ValueError:
            raise ConfigurationError(
                f"--k {self.k!r} says no depth: k must be a number, ascending numbers such as 0,2,4, or auto"
            ) from None
        return numbers[0] if len(numbers) == 1 else numbers


def source_of(target: Path, options: Loading, how: Drafting) -> tuple[Source, dict[str, SamplingDecoder]]:
    """What generates, and the decoders it is made of by the name to show."""
    how.check()
    k = how.depths()
    decoders = {"target": options.decoder(target)}
    drafter: DraftLike = None
    if how.medusa:
        heads = MedusaDrafter.from_pretrained(how.medusa, decoders["target"], tree=how.tree)
        if how.k == "auto":  # as deep as there are heads
            k = (*(depth for depth in DRAFT_LENGTHS if depth < heads.draft_shape.depth), heads.draft_shape.depth)
        drafter = _as_deep(heads, k, "the heads' tree") if how.k else heads
    elif how.eagle:
        deepest = k if isinstance(k, int) else k[-1]
        growth = spec.growth(how.growth or "chain", k=deepest, drawn=how.acceptor == "reject")
        head = EagleDrafter.from_pretrained(how.eagle, decoders["target"], growth)
        drafter = _as_deep(head, k, f"--growth {how.growth}") if how.k else head
    else:
        listed: list[OneDraft] = [name for name, asked in (("suffix", how.suffix), ("ngram", how.ngram)) if asked]
        if how.draft:
            decoders["draft"] = options.decoder(how.draft)
            listed.append(decoders["draft"])
        drafter = listed if len(listed) > 1 else listed[0] if listed else None
    if drafter is None:
        return decoders["target"], decoders
    made = SpeculativeGenerator(
        drafter, decoders["target"], k=k, acceptor=how.acceptor, fused=how.fused, exact=how.exact,
        confidence=how.confidence, vocabulary=how.vocabulary, synthetic_acceptance=how.synthetic_acceptance,
    )  # fmt: skip
    return made, decoders


def _as_deep(heads: MedusaDrafter | EagleDrafter, k: int | tuple[int, ...], shape: str) -> MedusaDrafter | EagleDrafter:
    """Heads that draft k tokens a round: ``shape`` says how deep they go, and a chain can be cut.

    Raises:
        ConfigurationError: that is another depth than ``k``.
    """
    draft_shape = heads.draft_shape
    if not isinstance(k, int) or k == draft_shape.depth:
        return heads
    if not draft_shape.is_chain or not 0 < k < draft_shape.depth:
        possible = f"1 to {draft_shape.depth}" if draft_shape.is_chain else "that"
        raise ConfigurationError(
            f"{shape} is {draft_shape.depth} deep, and --k {k} says otherwise; give {possible}, or no --k"
        )
    return heads.shortened(k)
