"""The verifier for requests that need the host at every token: Hugging Face logits processors, and scores.

Processors see exactly the prefixes that plain decoding would show them, in order, once each: under `Match` a row is
looked at only when all drafts before it stand and no text has ended there, so that neither a rejected token nor one
behind the end leaves a trace, even in a processor with a memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from paceline.core import reduce, tree
from paceline.core.acceptance.base import AcceptanceRule, committed, keeps_tokens
from paceline.core.errors import SamplingError
from paceline.core.protocols import HostText
from paceline.core.types import (
    PAD,
    Commit,
    DraftShape,
    FeatureSpec,
    PrefillResult,
    Proposal,
    RoundLimits,
    SamplingTensors,
)
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.steps import compact_path, prefill, window
from paceline.target.steps import features_of, pad_vocabulary, root_of, target_view
from paceline.target.verifier import fitted
from paceline.target.verify_mask import VerifyMask

_FORCED = 1e15
"""For a score of infinity: above any logit, and still a number over the least temperature."""


class HostVerifier:
    """Takes logits to the host and decides there, position by position.

    ``slots`` holds the text of every slot, or None; the engine, which adds what is committed to it, shares that list.
    ``logprobs`` holds, for every slot, the log-probability of each token of the last call (softmax of the processed
    logits at temperature 1, no filters), when ``scores`` is asked for.
    """

    def __init__(
        self,
        decoder: CompiledDecoder,
        draft_shape: DraftShape,
        *,
        rule: AcceptanceRule,
        wide: bool,
        slots: Sequence[HostText | None],
        reads: FeatureSpec | None = None,
    ) -> None:
        decoder.check_width(draft_shape.num_draft_tokens + 1)
        self.decoder, self.draft_shape, self._rule, self._reads = decoder, draft_shape, rule, reads
        self._wide = wide
        self._slots, self._kernels = slots, TorchKernels()
        self.logprobs: list[list[float]] = [[] for _ in range(decoder.batch_size)]

    def prefill(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> PrefillResult:
        """Read a prompt and pick the first token; see the protocol."""
        logits, features = prefill(self.decoder, slot, prompt, reads=self._reads)
        logits = _processed(self._slots[slot], list(prompt), logits[0, 0])
        token = self._choose(logits, len(prompt), sampling)
        self.logprobs[slot] = [_logprob(logits, token, len(prompt))]
        return PrefillResult(token, features)

    def finish_request(self, slot: int) -> None:
        """Forget the slot's scores."""
        self.logprobs[slot] = []

    def __call__(
        self, commit: Commit, proposal: Proposal | None, sampling: SamplingTensors, limits: RoundLimits
    ) -> Commit:
        """Verify a proposal; see the protocol."""
        proposal = fitted(proposal, self.draft_shape.num_draft_tokens)
        draft_shape = self.draft_shape if proposal is not None or self._wide else DraftShape.chain(0)
        token, row = root_of(commit.tokens, commit.count, commit.first_row)
        nothing = torch.full((len(row), draft_shape.num_draft_tokens), PAD, dtype=torch.int32)
        parents = proposal.parents if proposal is not None and isinstance(proposal.parents, Tensor) else None
        drafts = nothing if proposal is None else proposal.tokens
        view = VerifyMask(draft_shape)(drafts, parents, limit=limits.max_accept)
        drafts = view.proposal.tokens
        tokens = torch.cat((token.unsqueeze(1), drafts), 1).clamp(min=0, max=self.decoder.config.vocab_size - 1)
        rows = None if view.tree is None else view.tree.parents
        bucket = self.decoder.bucket_for(limits.max_rows)
        logits, features = window(self.decoder, tokens, row, bucket=bucket, parents=rows, reads=self._reads)
        chains = tree.chain(draft_shape.num_draft_tokens)
        lines = [chains] * len(row) if view.proposal.parents is None else view.proposal.parents.tolist()
        paths: list[list[int]] = []
        answers: list[list[int]] = []
        for slot, text in enumerate(self._slots):
            own = SamplingTensors(sampling.params[slot : slot + 1], sampling.seeds[slot : slot + 1], sampling.kind)
            if text is None or int(row[slot]) != len(text.text) - 1:  # no request takes part in this round
                way, answer = list[int](), [0]
                scores = self.logprobs[slot]
            elif keeps_tokens(self._rule):
                way, answer, scores = self._match(
                    text, logits[slot], drafts[slot].tolist(), parents=lines[slot], sampling=own
                )
            else:
                part = Proposal(drafts[slot : slot + 1], None, _line(proposal, slot))
                way, answer, scores = self._decide(text, logits[slot], part, sampling=own)
            self.logprobs[slot] = scores
            paths.append(way + [PAD] * (self.draft_shape.depth - len(way)))
            answers.append(answer)
        path = torch.tensor(paths, dtype=torch.int32).view(len(row), self.draft_shape.depth)
        if view.tree is not None:
            compact_path(self.decoder, row, path)
        count = torch.tensor([len(answer) for answer in answers], dtype=torch.int32)
        padded = [answer + [PAD] * (self.draft_shape.depth + 1 - len(answer)) for answer in answers]
        kept = None if features is None else features_of(path, features)
        return Commit(torch.tensor(padded, dtype=torch.int32), count, row + 1, kept)

    def _match(
        self, text: HostText, logits: Tensor, drafts: list[int], *, parents: Sequence[int], sampling: SamplingTensors
    ) -> tuple[list[int], list[int], list[float]]:
        """Walk down from the root, one processed choice after the other.

        -> rows of the path, tokens that are committed, and their log-probabilities
        """
        path: list[int] = []
        tokens: list[int] = []
        scores: list[float] = []
        row: int | None = 0
        while row is not None:
            length = len(text.text)
            processed = _processed(text, text.text, logits[row])
            token = self._choose(processed, length, sampling)
            scores.append(_logprob(processed, token, length))
            tokens.append(token)
            if text.append(token):  # the text ends here: processors must not see what follows
                break
            nodes = enumerate(zip(drafts, parents, strict=True), start=1)
            row = next((node for node, (draft, parent) in nodes if parent + 1 == row and draft == token), None)
            path += [] if row is None else [row]
        return path, tokens, scores

    def _decide(
        self, text: HostText, logits: Tensor, proposal: Proposal, *, sampling: SamplingTensors
    ) -> tuple[list[int], list[int], list[float]]:
        """As `_match`, by calling the rule with a chain and the processed logits after each of its tokens."""
        ids, size = text.text, self.decoder.config.vocab_size
        drafts = list(takewhile(lambda token: token != PAD, proposal.tokens[0].tolist()))
        legal = list(takewhile(lambda token: token < size, drafts))
        lines = [_processed(text, ids + legal[:i], line) for i, line in enumerate(logits[: len(legal) + 1])]
        if len(legal) < len(drafts):  # an id out of range counts as drawn; it is refused, so the row behind it is idle
            drafts = drafts[: len(legal) + 1]
            lines.append(lines[-1])
        processed = torch.stack(lines)
        positions = torch.arange(len(ids), len(ids) + len(lines), dtype=torch.int32).unsqueeze(0)
        q = proposal.draft_probs
        chain = Proposal(
            proposal.tokens[:, : len(drafts)], None, None if q is None else pad_vocabulary(q[:, : len(drafts)], size)
        )
        view = target_view(
            self._rule,
            processed.unsqueeze(0),
            positions,
            sampling=sampling,
            depth=len(drafts),
            kernels=self._kernels,
        )
        tokens = [t for t in committed(chain, self._rule(chain, view))[0].tolist() if t != PAD]
        decided = enumerate(zip(processed, tokens, strict=False), start=len(ids))
        scores = [_logprob(line, token, length) for length, (line, token) in decided]
        return list(range(1, len(tokens))), tokens, scores

    def _choose(self, logits: Tensor, position: int, sampling: SamplingTensors) -> int:
        where = torch.tensor([[position]], dtype=torch.int32)
        return int(self._kernels.sample_tokens(logits.view(1, 1, -1), where, sampling))


def _processed(text: HostText | None, ids: list[int], logits: Tensor) -> Tensor:
    """The logits [V] that follow ``ids``, after the text's logits processor."""
    processor = None if text is None else text.processor
    if processor is None:
        return logits
    # A copy: processors may write into what they get.
    scores: object = processor(torch.tensor([ids]), logits.unsqueeze(0).clone())
    if not isinstance(scores, Tensor) or scores.shape != (1, len(logits)):
        kind = f"a tensor of shape {list(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise SamplingError(f"a logits processor returned {kind}; it must return scores [1, {len(logits)}]")
    if bool(scores.isnan().any()):
        raise SamplingError(f"a logits processor returned NaN for the text of {len(ids)} tokens; no token follows")
    return scores[0].clamp(min=reduce.NEGATIVE, max=_FORCED)


def _logprob(logits: Tensor, token: int, length: int) -> float:
    """The log-probability of a token that follows ``length`` others; ``logits`` [V] as processed.

    Not of every processed line: what a processor says of drafts that it forbids itself decides nothing.

    Raises:
        SamplingError: the processors cut every token, as a grammar does that has come to a dead end.
    """
    if float(logits.max()) <= reduce.NEGATIVE:
        raise SamplingError(
            f"the logits processors left no token to follow the text of {length} tokens; let them allow one, such as "
            "the eos id, where a text must end"
        )
    return float(logits.log_softmax(-1)[token])


def _line(proposal: Proposal | None, slot: int) -> Tensor | None:
    return None if proposal is None or proposal.draft_probs is None else proposal.draft_probs[slot : slot + 1]
