"""The verifier for requests that need the host at every token: Hugging Face logits processors, and scores.

Processors see exactly the prefixes that plain decoding would show them, in order, once each: under `Match` a row is
looked at only when all drafts before it stand, so a rejected token leaves no trace even in a processor with a memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from paceline.core.accept import Match, Reject, committed
from paceline.core.types import PAD, Bounds, Commit, Proposal, SamplingBatch
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.kernels import Reference
from paceline.decoder.steps import prefill, window
from paceline.target.verifier import Acceptor, fitted, root_of

Processor = Callable[[Tensor, Tensor], Tensor]
"""Hugging Face's interface: ids [1, length] int64, scores [1, V] float32 -> scores [1, V]."""


class HostVerifier:
    """Takes logits to the host and decides there, position by position.

    ``logprobs`` holds, for every slot, the log-probability of each token of the last call (softmax of the processed
    logits at temperature 1, no filters), when ``scores`` is asked for.
    """

    def __init__(
        self, decoder: CompiledDecoder, width: int, *, acceptor: Acceptor, exact: bool, processor: Processor | None
    ) -> None:
        decoder.check_width(width)
        self.decoder, self.width, self._acceptor, self._exact = decoder, width, acceptor, exact
        self._processor, self._kernels = processor, Reference()
        self._texts: list[list[int]] = [[] for _ in range(decoder.batch_size)]
        self.logprobs: list[list[float]] = [[] for _ in range(decoder.batch_size)]

    def prefill(self, slot: int, prompt: Sequence[int], sampling: SamplingBatch) -> int:
        """Read a prompt and pick the first token; see the protocol."""
        logits = self._processed(list(prompt), prefill(self.decoder, slot, prompt)[0, 0])
        token = self._choose(logits, len(prompt), sampling)
        self._texts[slot] = [*prompt, token]
        self.logprobs[slot] = [_logprob(logits, token)]
        return token

    def release(self, slot: int) -> None:
        """Forget the slot's text."""
        self._texts[slot], self.logprobs[slot] = [], []

    def __call__(self, commit: Commit, proposal: Proposal | None, sampling: SamplingBatch, bounds: Bounds) -> Commit:
        """Verify a proposal; see the protocol."""
        proposal = fitted(proposal, self.width - 1)
        token, row = root_of(commit.tokens, commit.count, commit.start)
        width = self.width if self._exact or proposal is not None else 1
        drafts = torch.full((len(row), width - 1), PAD, dtype=torch.int32) if proposal is None else proposal.tokens
        place = torch.arange(width - 1, dtype=torch.int32)
        drafts = torch.where((place < bounds.limit.unsqueeze(1)) & (drafts >= 0), drafts, PAD)
        tokens = torch.cat((token.unsqueeze(1), drafts), 1).clamp(min=0, max=self.decoder.config.vocab_size - 1)
        logits = window(self.decoder, tokens, row, reach=self.decoder.reach(bounds.rows))
        rows = []
        for slot in range(len(row)):
            text = self._texts[slot]
            one = SamplingBatch(sampling.knobs[slot : slot + 1], sampling.keys[slot : slot + 1])
            if not text or int(row[slot]) != len(text) - 1:  # no request lives here
                rows.append([0])
                continue
            part = Proposal(drafts[slot : slot + 1], None, _line(proposal, slot))
            rows.append(self._decide(slot, logits[slot], part, sampling=one))
        count = torch.tensor([len(r) for r in rows], dtype=torch.int32)
        padded = torch.tensor([r + [PAD] * (self.width - len(r)) for r in rows], dtype=torch.int32)
        return Commit(padded, count, row + 1)

    def _decide(self, slot: int, logits: Tensor, proposal: Proposal, *, sampling: SamplingBatch) -> list[int]:
        text = self._texts[slot]
        if isinstance(self._acceptor, Match):
            tokens, scores = self._match(text, logits, proposal.tokens[0].tolist(), sampling=sampling)
        else:
            tokens, scores = self._reject(text, logits, proposal, acceptor=self._acceptor, sampling=sampling)
        self.logprobs[slot] = scores
        text += tokens
        return tokens

    def _match(
        self, text: list[int], logits: Tensor, drafts: list[int], *, sampling: SamplingBatch
    ) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        scores: list[float] = []
        for index, line in enumerate(logits):
            processed = self._processed(text + tokens, line)
            token = self._choose(processed, len(text) + index, sampling)
            tokens.append(token)
            scores.append(_logprob(processed, token))
            if index == len(drafts) or token != drafts[index]:
                break
        return tokens, scores

    def _reject(
        self, text: list[int], logits: Tensor, proposal: Proposal, *, acceptor: Reject, sampling: SamplingBatch
    ) -> tuple[list[int], list[float]]:
        size = self.decoder.config.vocab_size
        drafts = list(takewhile(lambda token: token != PAD, proposal.tokens[0].tolist()))
        legal = list(takewhile(lambda token: token < size, drafts))
        lines = [self._processed(text + legal[:i], line) for i, line in enumerate(logits[: len(legal) + 1])]
        if len(legal) < len(drafts):  # an id out of range counts as drawn; it is refused, so the row behind it is idle
            drafts = drafts[: len(legal) + 1]
            lines.append(lines[-1])
        processed = torch.stack(lines)
        laws = self._kernels.probabilities(processed.unsqueeze(0), sampling)
        q = None
        if proposal.law is not None:
            q = torch.nn.functional.pad(proposal.law[:, : len(drafts)], (0, laws.shape[-1] - proposal.law.shape[-1]))
        positions = torch.arange(len(text), len(text) + len(lines), dtype=torch.int32).unsqueeze(0)
        cut = Proposal(proposal.tokens[:, : len(drafts)], None, q)
        verdict = acceptor(cut, laws, positions, sampling, choose=self._kernels.choose)
        tokens = [t for t in committed(cut, verdict)[0].tolist() if t != PAD]
        return tokens, [_logprob(line, token) for line, token in zip(processed, tokens, strict=False)]

    def _choose(self, logits: Tensor, position: int, sampling: SamplingBatch) -> int:
        where = torch.tensor([[position]], dtype=torch.int32)
        return int(self._kernels.choose(logits.view(1, 1, -1), where, sampling))

    def _processed(self, ids: list[int], logits: Tensor) -> Tensor:
        if self._processor is None:
            return logits
        # A copy: processors may write into what they get.
        return self._processor(torch.tensor([ids]), logits.unsqueeze(0).clone())[0].clamp(min=-1e30)


def _logprob(logits: Tensor, token: int) -> float:
    return float(logits.log_softmax(-1)[token])


def _line(proposal: Proposal | None, slot: int) -> Tensor | None:
    return None if proposal is None or proposal.law is None else proposal.law[slot : slot + 1]
