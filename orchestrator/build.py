"""The one place that puts concrete parts together: drafters, verifiers, rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.accept import Match, Reject
from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter
from paceline.decoder.decoder import CompiledDecoder
from paceline.draft.lift import lift
from paceline.draft.model import ModelDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.none import NoDrafter
from paceline.loop import Engine
from paceline.rounds import TwoStep
from paceline.target.host import HostVerifier, Processor
from paceline.target.verifier import Acceptor, CompiledVerifier

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
    if not isinstance(k, int) or k < 0:
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


def engine(target: CompiledDecoder, source: Drafter, *, rule: Acceptor, exact: bool, demands: Demands) -> Engine:
    """A round over these parts, and what the loop must know of it.

    Raises:
        ConfigurationError: the width asked for is smaller than a full proposal needs.
    """
    width = source.nodes + 1 if demands.width is None else demands.width
    if not isinstance(width, int) or width < source.nodes + 1:
        raise ConfigurationError(f"width={width} is too small for {source.nodes} drafted tokens and the target's own")
    if demands.processor is None and not demands.scores:
        verifier: CompiledVerifier | HostVerifier = CompiledVerifier(target, width, acceptor=rule, exact=exact)
        scores = None
    else:
        verifier = HostVerifier(target, width, acceptor=rule, exact=exact, processor=demands.processor)
        scores = verifier if demands.scores else None
    steps = TwoStep(source, verifier)
    return Engine(steps, target.batch_size, source.nodes, width, source.reach, target.reaches, scores)
