"""The one place that puts concrete parts together: drafters, verifiers, rounds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.accept import Match, Reject
from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter, GraphDrafter
from paceline.core.types import Outline
from paceline.decoder.decoder import CompiledDecoder
from paceline.draft.lift import lift
from paceline.draft.model import ModelDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.none import NoDrafter
from paceline.loop import Engine
from paceline.rounds import Fused, TwoStep
from paceline.target.host import HostVerifier, Processor
from paceline.target.verifier import Acceptor, CompiledVerifier

log = logging.getLogger("paceline")

ACCEPTORS: dict[str, type[Acceptor]] = {"match": Match, "reject": Reject}
DRAFTERS: dict[str, Callable[[int], Drafter]] = {"none": lambda _k: NoDrafter(), "ngram": NgramDrafter}

DraftLike = CompiledDecoder | Drafter | Callable[[list[int]], list[int]] | str | None


@dataclass(frozen=True, slots=True)
class Demands:
    """What a single call asks of a verifier beyond the choice of tokens."""

    processor: Processor | None = None
    scores: bool = False
    width: int | None = None


def acceptor(name: str) -> Acceptor:
    """The acceptance rule of that name."""
    if name not in ACCEPTORS:
        raise ConfigurationError(f"acceptor={name!r} is unknown; use one of {', '.join(ACCEPTORS)}")
    return ACCEPTORS[name]()


def drafter(draft: DraftLike, target: CompiledDecoder, *, k: int, rule: Acceptor) -> Drafter:
    """A drafter of k tokens a round from whatever the user gave.

    Raises:
        ConfigurationError: k is negative, or nothing can be made of ``draft``.
    """
    if k < 0:
        raise ConfigurationError(f"k must be 0 or more drafted tokens per round, not {k}")
    if draft is None or k == 0:
        return NoDrafter()
    if isinstance(draft, CompiledDecoder):
        return ModelDrafter(draft, k, vocab_size=target.config.vocab_size, drawn=isinstance(rule, Reject))
    if isinstance(draft, str):
        if draft not in DRAFTERS:
            raise ConfigurationError(f"no drafter is called {draft!r}; there are {', '.join(DRAFTERS)}")
        return DRAFTERS[draft](k)
    if isinstance(draft, Drafter):
        return draft
    if callable(draft):
        return lift(draft, k)
    raise ConfigurationError(
        f"draft is a {type(draft).__name__}; give a decoder, a drafter, a function from ids to ids, 'ngram', or None"
    )


def engine(
    target: CompiledDecoder,
    source: Drafter,
    *,
    rule: Acceptor,
    exact: bool,
    demands: Demands,
    fused: bool | None = None,
) -> Engine:
    """A round over these parts, and what the loop must know of it.

    ``fused``: draft and verify in one graph; None = wherever that can be done.

    Raises:
        ConfigurationError: the width asked for does not hold a full proposal, the acceptance rule does not fit the
            drafter, or the drafter cannot be fused.
    """
    outline = _outline(source, demands.width)
    if isinstance(rule, Reject) and not outline.is_chain:
        raise ConfigurationError("acceptor='reject' is for chains; this drafter proposes trees: use acceptor='match'")
    # Where a row's bits depend on how many rows there are, every round of an exact generator has the same number.
    wide = demands.width is not None or (exact and outline.is_chain and not target.body.kernels.width_free)
    scores = None
    steps: TwoStep | Fused
    if demands.processor is None and not demands.scores:
        verifier = CompiledVerifier(target, outline, acceptor=rule, wide=wide, reads=source.reads)
        steps = _round(source, verifier, outline=outline, fused=fused)
    else:
        if fused:
            log.info("logits processors and scores need the host at every token: draft and target are two graphs")
        host = HostVerifier(target, outline, acceptor=rule, wide=wide, processor=demands.processor, reads=source.reads)
        steps, scores = TwoStep(source, host), host if demands.scores else None
    depth, width = source.outline.depth, outline.depth + 1
    return Engine(steps, target.batch_size, depth, width, source.reach, target.reaches, scores)


def _round(source: Drafter, verifier: CompiledVerifier, *, outline: Outline, fused: bool | None) -> TwoStep | Fused:
    # A wider window than the proposal's is padded on the way, which a fused graph has not.
    able = isinstance(source, GraphDrafter) and source.outline == outline
    if fused and not able:
        raise ConfigurationError(
            f"{type(source).__name__} cannot share a graph with the target here; leave fused unset, or use a "
            "draft model and no width of its own"
        )
    if isinstance(source, GraphDrafter) and able and fused is not False:
        return Fused(source, verifier)
    return TwoStep(source, verifier)


def _outline(source: Drafter, width: int | None) -> Outline:
    """That of the drafter, or a wider chain if a width is asked for."""
    outline = source.outline
    if width is None or width == outline.nodes + 1:
        return outline
    if not outline.is_chain:
        raise ConfigurationError(f"width={width} is for chains; this drafter's tree has {outline.nodes} nodes")
    if width < outline.nodes + 1:
        raise ConfigurationError(f"width={width} is too small for {outline.nodes} drafted tokens and the target's own")
    return Outline.chain(width - 1)
