"""The one place that puts concrete parts together: drafters, verifiers, rounds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from paceline.core.acceptance.base import AcceptanceRule, keeps_tokens
from paceline.core.acceptance.match import Match
from paceline.core.acceptance.rejection import Reject
from paceline.core.acceptance.synthetic import SyntheticAcceptance
from paceline.core.acceptance.typical import Typical
from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter, Shortens, TraceableDrafter, Varies
from paceline.core.types import DraftShape
from paceline.decoder.decoder import CompiledDecoder, ModelWithCache
from paceline.draft.fallback import FallbackDrafter
from paceline.draft.function import Function, lift
from paceline.draft.model import ModelDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.none import NoDrafter
from paceline.draft.retokenizing import RetokenizingDrafter, TokenizerPair
from paceline.draft.suffix import SuffixDrafter
from paceline.draft.vocab_map import VocabMap
from paceline.engine import validation
from paceline.engine.adaptive import AdaptiveRound, Stage
from paceline.engine.draft_length import DraftLengthController
from paceline.engine.engine import Engine, TimedRound
from paceline.engine.rounds import FusedRound, MultiTokenRound, TwoGraphRound, UndraftedRound
from paceline.target.autoregressive import AutoregressiveDecoder
from paceline.target.host_verifier import HostVerifier, Processor
from paceline.target.verifier import CompiledVerifier

log = logging.getLogger("paceline")

_RESTING = 5
"""Plain steps in one graph during a rest. More save little, and those behind the end of a text are for nothing."""

ACCEPTORS: dict[str, Callable[[], AcceptanceRule]] = {"match": Match, "reject": Reject, "typical": Typical}
DRAFTERS: dict[str, Callable[[int], Drafter]] = {
    "none": lambda _k: NoDrafter(),
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
}

Vocabularies = Callable[[CompiledDecoder], VocabMap | TokenizerPair]
"""From a draft model to what stands between its ids and the target's."""

OneDraft = CompiledDecoder | Drafter | Function | str
DraftLike = OneDraft | Sequence[OneDraft | tuple[OneDraft, int] | None] | None


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a single call asks of a verifier beyond the choice of tokens.

    Raises:
        SamplingError: ``scores``, which a call names ``output_scores``, is no truth value.
    """

    processor: Processor | None = None
    scores: bool = False
    width: int | None = None

    def __post_init__(self) -> None:
        validation.flag("output_scores", self.scores)


def decoder(given: object) -> CompiledDecoder:
    """The target, if it is one."""
    if isinstance(given, CompiledDecoder):
        return given
    raise ConfigurationError(
        f"target is a {type(given).__name__} and no decoder; load one with AutoDecoder.from_pretrained"
    )


def acceptor(name: str | AcceptanceRule, alpha: float | None = None) -> AcceptanceRule:
    """The acceptance rule of that name, a rule with values of the user's own, or, with ``alpha``, a simulated one."""
    if alpha is not None:
        if name != "match":
            raise ConfigurationError(f"synthetic_acceptance takes the place of acceptor={name!r}; give one of them")
        return SyntheticAcceptance(alpha)
    if isinstance(name, AcceptanceRule) and not isinstance(name, type):
        return name
    if not isinstance(name, str) or name not in ACCEPTORS:
        raise ConfigurationError(f"acceptor={name!r} is unknown; use one of {', '.join(ACCEPTORS)}, or a rule's object")
    return ACCEPTORS[name]()


def drafter(
    draft: DraftLike,
    target: CompiledDecoder,
    *,
    k: int,
    rule: AcceptanceRule,
    vocabulary: Vocabularies,
    confidence: float = 0.0,
) -> Drafter:
    """A drafter of k tokens a round from whatever the user gave.

    Raises:
        ConfigurationError: k is negative, or nothing can be made of ``draft``.
    """
    if not isinstance(k, int) or k < 0:
        raise ConfigurationError(f"k must be 0 or more drafted tokens per round, not {k}")
    if draft is None or k == 0:
        return NoDrafter()
    if isinstance(draft, CompiledDecoder):
        between = vocabulary(draft)
        if isinstance(between, TokenizerPair):
            eos = next(iter(target.config.eos_token_ids), None)
            return RetokenizingDrafter(draft, k, tokenizers=between, eos=eos, confidence=confidence)
        return ModelDrafter(draft, k, vocabulary=between, drawn=rule.draft_probs, confidence=confidence)
    if isinstance(draft, str):
        if draft not in DRAFTERS:
            raise ConfigurationError(
                f"no drafter is called {draft!r}; there are {', '.join(DRAFTERS)}. A model has to be loaded first, by "
                "AutoDecoder.from_pretrained"
            )
        return DRAFTERS[draft](k)
    if isinstance(draft, type) and hasattr(draft, "propose"):
        raise ConfigurationError(f"draft is the class {draft.__name__}; give an object of it")
    if isinstance(draft, Drafter):
        return draft
    if isinstance(draft, Sequence):
        if rule.draft_probs:
            raise ConfigurationError(
                f"acceptor={rule.name!r} uses the probabilities that drafts were drawn with, and a list of drafters "
                "reports none; use acceptor='match'"
            )
        return FallbackDrafter(
            [
                drafter(one, target, k=depth, rule=rule, confidence=confidence, vocabulary=vocabulary)
                for one, depth in (_with_depth(entry, k) for entry in draft)
            ]
        )
    if callable(draft):
        return lift(draft, k)
    raise ConfigurationError(
        f"draft is a {type(draft).__name__}; give a decoder, a drafter, a function from ids to ids, 'ngram', 'suffix', "
        "a list of these, or None"
    )


def models(draft: object) -> list[CompiledDecoder]:
    """The decoders that a drafter is made of, also those of lists and of entries with a depth."""
    if isinstance(draft, CompiledDecoder):
        return [draft]
    return [one for entry in draft for one in models(entry)] if isinstance(draft, list | tuple) else []


def _with_depth(entry: object, k: int) -> tuple[Any, int]:
    """An entry of a list of drafters, and how many tokens it drafts: k, unless it says otherwise."""
    if not (isinstance(entry, tuple) and len(entry) == 2 and type(entry[1]) is int):
        return entry, k
    if not 1 <= entry[1] <= k:
        raise ConfigurationError(f"a drafter in a list drafts 1 to k={k} tokens, not {entry[1]}")
    if isinstance(entry[0], Drafter):
        raise ConfigurationError(f"{type(entry[0]).__name__} has a depth of its own; put it into the list by itself")
    return entry


@dataclass(frozen=True, slots=True)
class Plan:
    """How a generator wants its rounds.

    rule    acceptance
    exact   no rounding depends on what was proposed
    fused   draft and verify in one graph; None = wherever that can be done
    pace    chooses the depth of the next rounds; None = always that of the drafter
    steps   plain steps in one graph, where nothing is drafted at all
    """

    rule: AcceptanceRule
    exact: bool = True
    fused: bool | None = None
    pace: DraftLengthController | None = None
    steps: int = 1


def engine(target: CompiledDecoder, source: Drafter, plan: Plan, *, demands: CallOptions) -> Engine:
    """A round over these parts, and what the loop must know of it.

    Raises:
        ConfigurationError: the width asked for does not hold a full proposal, the acceptance rule does not fit the
            drafter, or the drafter cannot be fused or shortened.
    """
    on_device = demands.processor is None and not demands.scores
    if plan.steps > 1 and isinstance(source, NoDrafter) and on_device and demands.width is None:
        steps: TimedRound = MultiTokenRound(AutoregressiveDecoder(target, plan.steps))
        return Engine(steps, target.batch_size, plan.steps - 1, plan.steps, None, target.kv_buckets)
    draft_shape = _outline(source, demands.width)
    if not plan.rule.trees and not draft_shape.is_chain:
        raise ConfigurationError(
            f"acceptor={plan.rule.name!r} is for chains; this drafter proposes trees: use acceptor='match'"
        )
    if not plan.rule.on_host and not on_device:
        raise ConfigurationError(
            f"acceptor={plan.rule.name!r} decides on the device, without logits processors and scores; "
            "leave them out, or use acceptor='match'"
        )
    # Where a row's bits depend on how many rows there are, every round of an exact generator has the same number.
    one_width = plan.exact and draft_shape.is_chain and not target.body.kernels.batch_invariant
    wide = demands.width is not None or one_width
    width, scores, host = draft_shape.depth + 1, None, None
    if not on_device:
        if plan.pace or (plan.fused is not False and isinstance(source, TraceableDrafter)):
            level = logging.WARNING if plan.fused else logging.INFO  # what was asked for by name is not done
            log.log(level, "processors and scores need the host at every token: two graphs of one depth, not one")
        host = HostVerifier(
            target, draft_shape, rule=plan.rule, wide=wide, processor=demands.processor, reads=source.reads
        )
        steps, scores = TwoGraphRound(source, host), host if demands.scores else None
    else:
        # In two steps a drafter may say nothing, for which every width would need a narrow graph.
        own = plan.pace is not None and not wide and draft_shape.is_chain and source.reads is None
        own = own and _fuses(source, target, plan.fused)

        def at(depth: int) -> Stage:
            """The round that drafts so many tokens."""
            short = source if depth in (0, source.draft_shape.depth) else _shortened(source, depth)
            seen = DraftShape.chain(depth) if own or not (one_width or short is source) else draft_shape
            room = depth + 1 if own else width
            depths = short.draft_lengths if isinstance(short, Varies) and not wide else ()
            verifier = CompiledVerifier(
                target, seen, rule=plan.rule, wide=wide, reads=source.reads, width=room, depths=depths
            )
            return Stage(_round(short, verifier, fused=plan.fused, rests=depth == 0), room)

        steps = at(source.draft_shape.depth).round
        if plan.pace is not None and source.draft_shape.num_draft_tokens:
            _check_ladder(plan.pace.ladder, source)
            rest = None
            if not wide and source.reads is None and keeps_tokens(plan.rule):
                some = min(_RESTING, width)
                room = some if own else width
                rest = Stage(UndraftedRound(source, AutoregressiveDecoder(target, some, width=room)), room)
            rungs = {depth: at(depth) for depth in plan.pace.ladder}
            steps = AdaptiveRound(rungs, plan.pace, drafter=source, rest=rest)
    return Engine(
        steps, target.batch_size, source.draft_shape.depth, width, source.max_positions, target.kv_buckets, scores, host
    )


def _check_ladder(ladder: tuple[int, ...], source: Drafter) -> None:
    if ladder[-1] > source.draft_shape.depth:
        raise ConfigurationError(
            f"k goes to {ladder[-1]} and {type(source).__name__} proposes {source.draft_shape.depth} tokens at most; "
            f"give "
            f"depths up to {source.draft_shape.depth}"
        )


def _shortened(source: Drafter, depth: int) -> Drafter:
    if not isinstance(source, Shortens):
        raise ConfigurationError(
            f"{type(source).__name__} has one depth only; give one number as k, or a draft model or 'ngram'"
        )
    return source.shortened(depth)


def _round(
    source: Drafter, verifier: CompiledVerifier, *, fused: bool | None, rests: bool
) -> TwoGraphRound | FusedRound:
    chains = source.draft_shape.is_chain and verifier.draft_shape.is_chain
    if isinstance(source, TraceableDrafter):
        if _apart(source.state, verifier.decoder):
            if fused:
                raise ConfigurationError(
                    "draft and target share a graph only with the same tp_degree; load them with one, or leave fused "
                    "unset"
                )
        elif fused is not False and (chains or source.draft_shape == verifier.draft_shape):
            return FusedRound(
                source, verifier, alone=rests or source.reads is None or not verifier.decoder.backend.device_state
            )
    if fused:
        raise ConfigurationError(f"{type(source).__name__} cannot share a graph with the target; leave fused unset")
    return TwoGraphRound(source, verifier)


def _fuses(source: Drafter, target: CompiledDecoder, fused: bool | None) -> bool:
    """Whether a drafter shares a graph with the target, if their draft_shapes let it."""
    return fused is not False and isinstance(source, TraceableDrafter) and not _apart(source.state, target)


def _apart(state: nn.Module, target: CompiledDecoder) -> bool:
    """Whether a draft model runs on other ranks than the target."""
    return isinstance(state, ModelWithCache) and state.group != target.body.group


def _outline(source: Drafter, width: int | None) -> DraftShape:
    """That of the drafter, or a wider chain if a width is asked for."""
    draft_shape = source.draft_shape
    if width is None:
        return draft_shape
    if isinstance(width, bool) or not isinstance(width, int):
        raise ConfigurationError(f"width must be an integer or None, not {width!r}")
    if width == draft_shape.num_draft_tokens + 1:
        return draft_shape
    if not draft_shape.is_chain:
        raise ConfigurationError(
            f"width={width} is for chains; this drafter's tree has {draft_shape.num_draft_tokens} nodes"
        )
    if width < draft_shape.num_draft_tokens + 1:
        raise ConfigurationError(
            f"width={width} is too small for {draft_shape.num_draft_tokens} drafted tokens and the target's own"
        )
    return DraftShape.chain(width - 1)
