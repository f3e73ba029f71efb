"""A smaller model as a drafter.

It re-reads the whole last commit at a fixed width, so it needs no length of its own and no repair when all its drafts
were accepted. When the target samples, it picks with the target's own noise (coupled drafting), which keeps
acceptance close to the best possible; under `Reject` it draws from its law with noise of its own and reports the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from paceline.core import law, noise
from paceline.core.backlog import Backlog
from paceline.core.types import Bounds, Commit, Outline, Proposal, Reads, SamplingBatch
from paceline.decoder.decoder import Body, CompiledDecoder
from paceline.decoder.steps import prefill


class DraftStep(nn.Module):
    """Read a commit, then ``length`` tokens one by one."""

    def __init__(self, body: Body, reach: int, *, length: int, drawn: bool, vocab_size: int) -> None:
        super().__init__()
        self.body, self._reach, self._length, self._drawn = body, reach, length, drawn
        self._vocab_size = vocab_size

    def forward(self, tokens: Tensor, count: Tensor, start: Tensor, knobs: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
        """The fields of a Commit [B, W], knobs [B, 4], keys [B, 2] -> drafts [B, N] (and law [B, N, V] if drawn)."""
        sampling = SamplingBatch(knobs, keys)
        # The target may have ids that this model lacks; what follows them is a guess like any other.
        known = tokens.clamp(min=0, max=self.body.config.vocab_size - 1)
        hidden, _ = self.body.window(known, start, self._reach)
        last = (count - 1).to(torch.int64).view(-1, 1, 1).expand(-1, 1, hidden.shape[-1])
        hidden = hidden.gather(1, last)
        drafts: list[Tensor] = []
        laws: list[Tensor] = []
        for step in range(self._length):
            row = start + count + step  # of the token that is picked now
            if step:
                hidden, _ = self.body.window(drafts[-1], row - 1, self._reach)
            logits = self.body.logits(hidden)[..., : self._vocab_size].contiguous()
            stream = noise.DRAFT if self._drawn else noise.TARGET
            drafts.append(self.body.kernels.choose(logits, row.unsqueeze(1), sampling, stream=stream))
            if self._drawn:
                laws.append(law.probabilities(logits, sampling))
        if self._drawn:
            return torch.cat(drafts, 1), torch.cat(laws, 1)
        return (torch.cat(drafts, 1),)


class ModelDrafter:
    """Drafts chains of ``length`` tokens with a decoder. A `paceline.core.protocols.GraphDrafter`.

    ``drawn``: draw from the law and report it, for `Reject`; otherwise pick with the target's noise, for `Match`.
    ``vocab_size`` is the target's: ids that only the draft has are not drafted.
    """

    reads: Reads | None = None

    def __init__(self, decoder: CompiledDecoder, length: int, *, vocab_size: int, drawn: bool = False) -> None:
        decoder.check_width(length + 1)
        self.decoder, self._drawn = decoder, drawn
        self.outline = Outline.chain(length)
        self._vocab_size = min(vocab_size, decoder.config.vocab_size)
        self.reach: int | None = decoder.n_positions
        self._backlog = Backlog()

    def admit(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Read a prompt, unless it is longer than this model's context: then nothing is ever asked of it."""
        self._backlog.forget(slot)
        if len(prompt) < self.decoder.n_positions:
            prefill(self.decoder, slot, prompt)

    def observe(self, commit: Commit) -> None:
        """Only noted: the step of `propose` reads the last commit itself."""
        self._backlog.add(commit)

    def ready(self) -> None:
        """Read what was committed while nothing was proposed, as far as this model's context goes."""
        for slot, start, tokens in self._backlog.take():
            if start + len(tokens) <= self.decoder.n_positions:
                known = [min(token, self.decoder.config.vocab_size - 1) for token in tokens]
                prefill(self.decoder, slot, known, start=start)

    def propose(self, commit: Commit, sampling: SamplingBatch, bounds: Bounds) -> Proposal:
        """Draft; see the protocol."""
        self.ready()
        inputs = (commit.tokens, commit.count, commit.start, sampling.knobs, sampling.keys)
        name = f"{self.name(bounds.rows)},from {commit.tokens.shape[1]}"
        out = self.decoder.graph(name, self._make, inputs, reach=self._reach(bounds.rows))(*inputs)
        return Proposal(out[0], None, out[1] if self._drawn else None)

    def step(self, rows: int) -> nn.Module:
        """See the protocol."""
        return self._make(self.decoder.body, self._reach(rows))

    def name(self, rows: int) -> str:
        """See the protocol."""
        drawn = ",drawn" if self._drawn else ""
        return f"draft[{self.outline.nodes}{drawn},vocabulary {self._vocab_size}]@{self._reach(rows)}"

    def facts(self) -> dict[str, object]:
        """See the protocol."""
        return self.decoder.facts()

    def _reach(self, rows: int) -> int:
        return self.decoder.reach(rows + self.outline.nodes)

    @property
    def _make(self) -> partial[DraftStep]:
        return partial(DraftStep, length=self.outline.nodes, drawn=self._drawn, vocab_size=self._vocab_size)
