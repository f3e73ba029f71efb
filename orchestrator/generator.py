"""`SpeculativeGenerator`: a draft that proposes and a target that decides."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from functools import partial
from numbers import Real

from paceline import build, vocab_compat
from paceline.core.acceptance.base import AcceptanceRule, keeps_tokens
from paceline.core.acceptance.synthetic import SyntheticAcceptance
from paceline.core.errors import ConfigurationError
from paceline.decoder.decoder import CompiledDecoder
from paceline.engine import draft_length as pacing
from paceline.engine import warmup
from paceline.engine.engine import Engine, RequestQueue
from paceline.outputs import ReportsHealth, RequestOutput, Statistics
from paceline.sampler import Sampler

log = logging.getLogger("paceline")


class SpeculativeGenerator(Sampler):
    """Decodes several tokens in a round.

    The tokens are those of plain decoding with the same seed, at any temperature, whatever the draft
    (``acceptor="match"``); ``acceptor="reject"`` keeps the law but not the tokens, and accepts a little more.
    ``acceptor="typical"`` is LOSSY: it keeps neither, above temperature 0.

    draft     a decoder, any drafter, a function from ids to ids, "ngram", "suffix", None (plain decoding), or a list
              of these, of which the first that has something to say proposes
    target    the decoder whose text it is
    k         drafted tokens per round, not counting the target's own; a drafter object brings its own number. A
              sequence of depths, such as `paceline.DRAFT_LENGTHS`, lets rounds choose among them. Without a draft, k +
              1 plain steps run in one graph
    acceptor  "match", "reject", "typical", or a rule with values of its own: `Typical(epsilon=0.09, alpha=0.3)`,
              or `Simulated(alpha)`, by which drafts stand at random, to measure speed: NOT REAL TEXT comes out
    exact     run every round through one graph width, so that no rounding depends on what was proposed; False
              lets rounds without a proposal take a narrower graph
    confidence  a draft model stops proposing where its largest probability falls below this; 0 = never
    vocabulary  "same": the draft must have the target's tokenizer; "intersection": it drafts only what both have;
              "retokenize": they exchange text, by the tokenizers in their folders or those of a `Reencoding`
    fused     draft and verify in one graph; None (default) = wherever it can be done, False = never
    synthetic_acceptance  alpha: the same as acceptor=Simulated(alpha)

    Raises:
        PairingError: draft and target have different tokenizers or batch sizes.
        ConfigurationError: an option is out of range, or says something about a draft that is not there.
    """

    def __init__(
        self,
        draft: build.DraftLike,
        target: CompiledDecoder,
        *,
        k: int | Sequence[int] = 4,
        acceptor: str | AcceptanceRule = "match",
        exact: bool = True,
        fused: bool | None = None,
        confidence: float = 0.0,
        vocabulary: vocab_compat.VocabularyLike = "same",
        synthetic_acceptance: float | None = None,
    ) -> None:
        _check_types(exact=exact, fused=fused, confidence=confidence)
        target = build.decoder(target)
        rule, depth, pace = build.acceptor(acceptor, synthetic_acceptance), *pacing.of(k)
        if isinstance(rule, SyntheticAcceptance):
            log.warning("acceptance is synthetic: what comes out is not real text")
        elif not rule.lossless:
            log.warning(
                "acceptor %r is lossy: above temperature 0 the text does not follow the target's distribution",
                rule.name,
            )
        steps = depth + 1 if draft is None else 1
        self.target, self._plan = target, build.Plan(rule, exact, fused, pace, steps)
        given = list(draft) if isinstance(draft, list | tuple) else [draft]
        models = build.models(draft)
        _check(self._plan, drafts=any(one not in (None, "none") for one in given))
        _check_of_models(models, confidence=confidence, vocabulary=vocabulary)
        between = partial(vocab_compat.between, target=target, kind=vocabulary)
        self.drafter = build.drafter(draft, target, k=depth, rule=rule, confidence=confidence, vocabulary=between)
        target.check_width(self.drafter.draft_shape.num_draft_tokens + 1)
        self._parts = [target, *models]
        self.statistics = self._fresh()

    def compile(self) -> None:
        """Make every graph a call without host-side processors needs, so that no call has to wait for one."""
        warmup.up(self._engine(build.CallOptions()), self._decoders())

    def _fresh(self) -> Statistics:
        return Statistics(acceptor=self._plan.rule.name, lossy=not self._plan.rule.lossless)

    def _decoders(self) -> list[CompiledDecoder]:
        return self._parts

    def _engine(self, demands: build.CallOptions) -> Engine:
        return build.engine(self.target, self.drafter, self._plan, demands=demands)

    def _hold(self, engine: Engine, door: RequestQueue) -> Generator[RequestOutput | None, None, None]:
        told = self.drafter if isinstance(self.drafter, ReportsHealth) else None
        before = None if told is None else told.health
        try:
            yield from super()._hold(engine, door)
        finally:
            now = None if told is None else told.health
            if before is not None and now is not None:
                self.statistics.drafter_health = now.since(before)


def _check_types(*, exact: object, fused: object, confidence: object) -> None:
    """Refuse what Python would take for a truth value, or compare with a number and fail."""
    if not isinstance(exact, bool):
        raise ConfigurationError(f"exact must be True or False, not {exact!r}")
    if fused is not None and not isinstance(fused, bool):
        raise ConfigurationError(f"fused must be True, False or None, not {fused!r}")
    if isinstance(confidence, bool) or not isinstance(confidence, Real):
        raise ConfigurationError(f"confidence must be a number from 0 (off) to 1, not {confidence!r}")


def _check(plan: build.Plan, *, drafts: bool) -> None:
    """Refuse what a plan without a drafter would only claim to do."""
    if not drafts and not keeps_tokens(plan.rule):
        raise ConfigurationError(
            f"acceptor={plan.rule.name!r} needs a drafter, and draft is None; give one, or leave "
            "acceptor and synthetic_acceptance out"
        )
    if not drafts and plan.fused:
        raise ConfigurationError("fused=True needs a draft to fuse with the target, and draft is None; leave it unset")


def _check_of_models(
    models: Sequence[CompiledDecoder], *, confidence: float, vocabulary: vocab_compat.VocabularyLike
) -> None:
    """Refuse options of draft models where there is none to heed them."""
    for name, asked in (("confidence", confidence != 0), ("vocabulary", vocabulary != "same")):
        if asked and not models:
            raise ConfigurationError(
                f"{name} is of a draft model, and draft holds no decoder; leave it out (a drafter object has its own)"
            )
