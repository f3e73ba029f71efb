"""`SpeculativeGenerator`: a draft that proposes and a target that decides."""

from __future__ import annotations

from paceline import build, pairing, warm
from paceline.decoder.decoder import CompiledDecoder
from paceline.loop import Engine
from paceline.result import Statistics
from paceline.sampler import Sampler


class SpeculativeGenerator(Sampler):
    """Decodes several tokens in a round.

    The tokens are those of plain decoding with the same seed, at any temperature, whatever the draft
    (``acceptor="match"``); ``acceptor="reject"`` keeps the law but not the tokens, and accepts a little more.

    draft     a decoder, any drafter, a function from ids to ids, "ngram", or None (plain decoding)
    target    the decoder whose text it is
    k         drafted tokens per round, not counting the target's own; a drafter object brings its own number
    acceptor  "match" or "reject"
    exact     run every round through one graph width, so that no rounding depends on what was proposed; False
              lets rounds without a proposal take a narrower graph
    fused     draft and verify in one graph; None (default) = wherever it can be done, False = never

    Raises:
        PairingError: draft and target have different tokenizers or batch sizes.
        ConfigurationError: an option is out of range.
    """

    def __init__(
        self,
        draft: build.DraftLike,
        target: CompiledDecoder,
        *,
        k: int = 4,
        acceptor: str = "match",
        exact: bool = True,
        fused: bool | None = None,
    ) -> None:
        self.target, self._exact, self._fused = target, exact, fused
        self._rule = build.acceptor(acceptor)
        if isinstance(draft, CompiledDecoder):
            pairing.check(draft, target)
        self.drafter = build.drafter(draft, target, k=k, rule=self._rule)
        target.check_width(self.drafter.outline.nodes + 1)
        self._parts = [target, draft] if isinstance(draft, CompiledDecoder) else [target]
        self.statistics = Statistics()

    def compile(self) -> None:
        """Make every graph a call without host-side processors needs, so that no call has to wait for one."""
        warm.up(self._engine(build.Demands()), self._decoders())

    def _decoders(self) -> list[CompiledDecoder]:
        return self._parts

    def _engine(self, demands: build.Demands) -> Engine:
        return build.engine(
            self.target, self.drafter, rule=self._rule, exact=self._exact, demands=demands, fused=self._fused
        )
