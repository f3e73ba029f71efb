"""The verifier of rounds in which some request needs the host at every token: logits processors, penalties, grammars
and log-probabilities. They are properties of a row; the other rows' tokens do not change.

Processors see exactly the prefixes of plain decoding, in order, once each: under `Match` a row is processed only when
all drafts before it are accepted and the sequence has not stopped before it, so a rejected token, or one after the end,
has no effect, even on a stateful processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor, nn

from paceline.core import reduce, tree
from paceline.core.acceptance.base import committed, keeps_tokens
from paceline.core.errors import SamplingError
from paceline.core.protocols import HostText
from paceline.core.types import (
    PAD,
    Commit,
    DraftShape,
    Proposal,
    RoundLimits,
    SamplingTensors,
    TokenScore,
)
from paceline.decoder.steps import compact_path, window
from paceline.target.base import TargetVerifier, fitted, processed, scores_of
from paceline.target.steps import VerifyMask, features_of, pad_vocabulary, root_of, target_view


class HostVerifier(TargetVerifier):
    """Copies logits to the host, which decides position by position."""

    def __call__(
        self, commit: Commit, proposal: Proposal | None, sampling: SamplingTensors, limits: RoundLimits
    ) -> Commit:
        proposal = None if proposal is None else fitted(proposal, self.draft_shape.num_draft_tokens)
        draft_shape = self.draft_shape if proposal is not None or self._wide else DraftShape.chain(0)
        token, row = root_of(commit.tokens, commit.count, commit.first_row)
        nothing = torch.full((len(row), draft_shape.num_draft_tokens), PAD, dtype=torch.int32)
        parents = proposal.parents if proposal is not None and isinstance(proposal.parents, Tensor) else None
        drafts = nothing if proposal is None else proposal.tokens
        limit = torch.tensor(limits.max_accept, dtype=torch.int32)
        view = VerifyMask(draft_shape)(drafts, parents, limit=limit)
        drafts = view.proposal.tokens
        tokens = torch.cat((token.unsqueeze(1), drafts), 1).clamp(min=0, max=self.decoder.config.vocab_size - 1)
        rows = None if view.tree is None else view.tree.parents
        bucket = self.decoder.bucket_for(limits.max_rows)
        read = partial(window, self.decoder, bucket=bucket, reads=self._reads, used_slots=limits.used_slots)
        logits, features = read(tokens, row, parents=rows)
        chains = tree.chain(draft_shape.num_draft_tokens)
        lines = [chains] * len(row) if view.proposal.parents is None else view.proposal.parents.tolist()
        paths: list[list[int]] = []
        answers: list[list[int]] = []
        deep = torch.arange(draft_shape.num_draft_tokens + 1) if view.tree is None else view.depth
        choices: list[list[int]] = self._kernels.sample_tokens(
            logits, (row.unsqueeze(1) + 1 + deep).to(torch.int32).contiguous(), sampling
        ).tolist()
        self.scores = []
        for slot, text in enumerate(self._slots):
            own = SamplingTensors(sampling.params[slot : slot + 1], sampling.seeds[slot : slot + 1], sampling.kind)
            if text is None or int(row[slot]) != len(text.text) - 1:  # no request takes part in this round
                way, answer, scores = list[int](), [0], list[TokenScore]()
            elif keeps_tokens(self._rule):
                way, answer, scores = self._match(
                    text, logits[slot], choices[slot], drafts=drafts[slot].tolist(), parents=lines[slot], sampling=own
                )
            else:
                part = Proposal(drafts[slot : slot + 1], None, _line(proposal, slot))
                try:
                    way, answer, scores = self._decide(text, logits[slot], part, sampling=own)
                except SamplingError as error:
                    text.fail(error)
                    way, answer, scores = [], [0], []
            self.scores.append(scores)
            paths.append(way + [PAD] * (self.draft_shape.depth - len(way)))
            answers.append(answer)
        path = torch.tensor(paths, dtype=torch.int32).view(len(row), self.draft_shape.depth)
        if view.tree is not None:
            compact_path(self.decoder, row, path, used_slots=limits.used_slots)
        count = torch.tensor([len(answer) for answer in answers], dtype=torch.int32)
        padded = [answer + [PAD] * (self._width - len(answer)) for answer in answers]
        unused = self._width - self.draft_shape.depth - 1
        kept = None if features is None else nn.functional.pad(features_of(path, features), (0, 0, 0, unused))
        return Commit(torch.tensor(padded, dtype=torch.int32), count, row + 1, kept)

    def _match(
        self,
        text: HostText,
        logits: Tensor,
        choices: list[int],
        *,
        drafts: list[int],
        parents: Sequence[int],
        sampling: SamplingTensors,
    ) -> tuple[list[int], list[int], list[TokenScore]]:
        """Walk down from the root, one sampled token after the other. ``choices``: those of unprocessed logits.

        -> rows of the path, tokens that are committed, and their scores
        """
        path: list[int] = []
        tokens: list[int] = []
        scores: list[TokenScore] = []
        row: int | None = 0
        while row is not None:
            try:
                line, token = logits[row], choices[row]
                if text.processing is not None:
                    line = processed(text, text.text, logits[row])
                    token = self._choose(line, len(text.text), sampling)
                scores += scores_of(text, token, raw=logits[row], processed=line)
            except SamplingError as error:  # of this sequence only: the others continue
                text.fail(error)
                return path[:-1], tokens or [0], scores
            tokens.append(token)
            if text.append(token):  # the sequence stops here: processors must not see what follows
                break
            nodes = enumerate(zip(drafts, parents, strict=True), start=1)
            row = next((node for node, (draft, parent) in nodes if parent + 1 == row and draft == token), None)
            path += [] if row is None else [row]
        return path, tokens, scores

    def _decide(
        self, text: HostText, logits: Tensor, proposal: Proposal, *, sampling: SamplingTensors
    ) -> tuple[list[int], list[int], list[TokenScore]]:
        """Decide by calling the rule with a chain and the processed logits after each of its tokens."""
        ids = text.text
        drafts = list(takewhile(lambda token: token != PAD, proposal.tokens[0].tolist()))
        lines = [processed(text, ids, logits[0])]
        for place, token in enumerate(drafts):
            # An id out of range or forbidden here counts as sampled and is rejected: the row after it is idle.
            if token >= len(lines[-1]) or float(lines[-1][token]) <= reduce.NEGATIVE:
                drafts = drafts[: place + 1]
                lines.append(lines[-1])
                break
            lines.append(processed(text, ids + drafts[: place + 1], logits[place + 1]))
        stacked = torch.stack(lines)
        positions = torch.arange(len(ids), len(ids) + len(lines), dtype=torch.int32).unsqueeze(0)
        q = proposal.draft_probs
        draft_probs = None if q is None else pad_vocabulary(q[:, : len(drafts)], self.decoder.config.vocab_size)
        chain = Proposal(proposal.tokens[:, : len(drafts)], None, draft_probs)
        view = target_view(
            self._rule,
            stacked.unsqueeze(0),
            positions,
            sampling=sampling,
            depth=len(drafts),
            kernels=self._kernels,
        )
        tokens = [t for t in committed(chain, self._rule(chain, view))[0].tolist() if t != PAD]
        scores: list[TokenScore] = []
        for raw, line, token in zip(logits, stacked, tokens, strict=False):
            scores += scores_of(text, token, raw=raw, processed=line)
        return list(range(1, len(tokens))), tokens, scores


def _line(proposal: Proposal | None, slot: int) -> Tensor | None:
    return None if proposal is None or proposal.draft_probs is None else proposal.draft_probs[slot : slot + 1]
