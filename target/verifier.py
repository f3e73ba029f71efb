"""The verifier: one compiled step from a commit and a proposal to the next commit.

Only ids and counts leave the graph. What needs the host for every token (processors, scores) is in
`paceline.target.host`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from paceline.core.accept import Match, Reject, committed
from paceline.core.types import PAD, Bounds, Commit, Proposal, SamplingBatch
from paceline.decoder.backends.base import Step
from paceline.decoder.decoder import Body, CompiledDecoder
from paceline.decoder.steps import prefill

Acceptor = Match | Reject
Root = tuple[Tensor, Tensor]
_UNDRAWN = 7  # inputs of a step with drafts but without their law


def root_of(tokens: Tensor, count: Tensor, start: Tensor) -> Root:
    """The last committed token and its row, both [B] int32: no decoder has read that token yet."""
    last = (count - 1).to(torch.int64).unsqueeze(1)
    return tokens.gather(1, last).squeeze(1), start + count - 1


def fitted(proposal: Proposal | None, nodes: int) -> Proposal | None:
    """A chain filled up with PAD to the number of nodes that the graph takes."""
    if proposal is None or proposal.tokens.shape[1] == nodes:
        return proposal
    missing = nodes - proposal.tokens.shape[1]
    tokens = nn.functional.pad(proposal.tokens, (0, missing), value=PAD)
    return Proposal(tokens, None, None if proposal.law is None else nn.functional.pad(proposal.law, (0, 0, 0, missing)))


class VerifyStep(nn.Module):
    """Target pass over the root and a chain of drafts, law, acceptance."""

    def __init__(self, body: Body, reach: int, acceptor: Acceptor) -> None:
        super().__init__()
        self.body, self._reach, self._acceptor = body, reach, acceptor

    def forward(self, tokens: Tensor, count: Tensor, start: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The fields of a Commit; then limit [B] int32, knobs [B, 4], keys [B, 2], drafts [B, N] if N > 0, and the
        drafts' law [B, N, V] if they were drawn. -> the fields of the next Commit, N + 1 wide.
        """
        limit, knobs, keys = rest[:3]
        drafts = rest[3] if len(rest) > 3 else tokens[:, :0]
        sampling = SamplingBatch(knobs, keys)
        token, row = root_of(tokens, count, start)
        place = torch.arange(drafts.shape[1], dtype=torch.int32, device=tokens.device)
        # Ids out of range stay: no rule accepts them, and a drawn one counts as drawn, so that the law stays exact.
        drafts = torch.where((place < limit.unsqueeze(1)) & (drafts >= 0), drafts, PAD)
        window = torch.cat((token.unsqueeze(1), drafts), 1)
        hidden = self.body.window(window.clamp(min=0, max=self.body.config.vocab_size - 1), row, self._reach)
        logits = self.body.logits(hidden)
        positions = row.unsqueeze(1) + 1 + torch.arange(window.shape[1], dtype=torch.int32, device=tokens.device)
        drawn = nn.functional.pad(rest[4], (0, logits.shape[-1] - rest[4].shape[-1])) if len(rest) > 4 else None
        proposal = Proposal(drafts, None, drawn)
        if isinstance(self._acceptor, Match):
            verdict = self._acceptor(proposal, self.body.kernels.choose(logits, positions, sampling))
        else:
            kernels = self.body.kernels
            law = kernels.probabilities(logits, sampling)
            verdict = self._acceptor(proposal, law, positions, sampling, choose=kernels.choose)
        return committed(proposal, verdict), verdict.count + 1, row + 1


class CompiledVerifier:
    """Runs `VerifyStep` at one width (``exact``) or, when nothing is proposed, at width 1.

    ``width`` is the most tokens a round commits. With ``exact`` every round goes through the same graph, so that a
    token does not depend on what was proposed.
    """

    def __init__(self, decoder: CompiledDecoder, width: int, *, acceptor: Acceptor, exact: bool) -> None:
        decoder.check_width(width)
        self.decoder, self.width, self._acceptor, self._exact = decoder, width, acceptor, exact
        self._nothing = torch.full((decoder.batch_size, width - 1), PAD, dtype=torch.int32)

    def prefill(self, slot: int, prompt: Sequence[int], sampling: SamplingBatch) -> int:
        """Read a prompt and pick the first token; see the protocol."""
        logits = prefill(self.decoder, slot, prompt)
        position = torch.tensor([[len(prompt)]], dtype=torch.int32)
        return int(self.decoder.body.kernels.choose(logits, position, sampling))

    def release(self, slot: int) -> None:
        """Nothing to forget: the next request's prompt overwrites the cache rows."""

    def __call__(self, commit: Commit, proposal: Proposal | None, sampling: SamplingBatch, bounds: Bounds) -> Commit:
        """Verify a proposal; see the protocol."""
        proposal = fitted(proposal, self.width - 1)
        inputs = [commit.tokens, commit.count, commit.start, bounds.limit, sampling.knobs, sampling.keys]
        width = self.width if self._exact or proposal is not None else 1
        if width > 1:
            inputs.append(self._nothing if proposal is None else proposal.tokens)
            if proposal is not None and proposal.law is not None and isinstance(self._acceptor, Reject):
                inputs.append(proposal.law)
        tokens, count, start = self._step(width, inputs, bounds.rows)(*inputs)
        if width < self.width:
            tokens = nn.functional.pad(tokens, (0, self.width - width), value=PAD)
        return Commit(tokens, count, start)

    def _step(self, width: int, inputs: list[Tensor], rows: int) -> Step:
        kind = "reject" if isinstance(self._acceptor, Reject) else "match"
        drawn = ",drawn" if len(inputs) > _UNDRAWN else ""
        name = f"verify[{width},{kind}{drawn},from {inputs[0].shape[1]}]"
        make = partial(VerifyStep, acceptor=self._acceptor)
        return self.decoder.graph(name, make, inputs, reach=self.decoder.reach(rows))
