"""Drafting for rows with a prediction, or with a grammar that limits which tokens may follow.

A prediction is drafted first. A draft is cut at the first token that a grammar forbids, and continues with the tokens
that the grammar forces; a draft model chooses under the grammar's mask. Drafts sampled from probabilities are not cut:
that would make the output's distribution wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from paceline.core import tree
from paceline.core.protocols import Drafter, HostText
from paceline.core.types import PAD, Commit, DraftShape, Proposal, RoundLimits, SamplingTensors
from paceline.draft.suffix import CopyTracker, SuffixAutomaton

_BORDER = -2  # after the prediction; no token is negative, so nothing matches across it
_TRUST = 8  # repeated tokens assumed at the start of an output, because the request expects the prediction
_MIN_MATCH = 2  # tokens that must match before a position to continue from it


class _PredictedText:
    """The output of one request compared with its prediction. Ids outside the vocabulary are harmless: none is
    accepted.

    The prediction is followed from its beginning, past tokens that differ. After a longer change, the longest suffix of
    the output that occurs in the prediction finds the position again.
    """

    def __init__(self, text: HostText) -> None:
        self.text, self._seen = text.text, text.prompt_length
        self._automaton = SuffixAutomaton()
        for token in (*(max(0, token) for token in text.prediction), _BORDER):
            self._automaton.append(token)
        self._copies = CopyTracker()
        self._copies.begin(self._automaton.tokens, 0, _TRUST)
        self._state = self._length = 0

    def follow(self) -> None:
        tokens, self._seen = self.text[self._seen :], len(self.text)
        self._copies.follow(tokens)
        for token in tokens:
            self._state, self._length = self._automaton.follow(self._state, self._length, token)
        if self._length > self._copies.run:
            self._copies.begin(self._automaton.tokens, self._automaton.end_of(self._state), self._length)

    def ahead(self, limit: int) -> list[int]:
        """Return the next tokens of the prediction, at most ``limit``; [] where the output differs from it."""
        if self._copies.run < _MIN_MATCH:
            return []
        tokens = self._copies.ahead(limit)
        return tokens[: tokens.index(_BORDER)] if _BORDER in tokens else tokens


class PerRequestDrafter(Drafter):
    """Wrapper around another drafter.

    slots        the sequence of every slot, or None; shared with the engine
    draft_shape  of its proposals: the other drafter's, or a chain if that one drafts nothing
    predicted    for every slot, number of leading tokens of the last proposal that are from the prediction
    """

    def __init__(self, drafter: Drafter, slots: Sequence[HostText | None], *, draft_shape: DraftShape) -> None:
        self._inner, self._slots, self.draft_shape = drafter, slots, draft_shape
        self.reads = drafter.reads
        self.max_positions = drafter.max_positions
        self._texts: dict[int, _PredictedText] = {}

    def update(self, commit: Commit) -> None:
        self.predicted = [0] * len(self._slots)
        self._inner.update(commit)
        for slot, text in enumerate(self._slots):
            if text is None or not text.prediction:
                self._texts.pop(slot, None)
                continue
            predicted = self._texts.get(slot)
            if predicted is None or predicted.text is not text.text:
                predicted = self._texts[slot] = _PredictedText(text)
            predicted.follow()

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        most = [min(limit, self.draft_shape.depth) for limit in limits.max_accept]
        predictions = {slot: ahead for slot, predicted in self._texts.items() if (ahead := predicted.ahead(most[slot]))}
        proposal = self._others(commit, sampling, limits, most=most, predictions=predictions)
        self.predicted = [0] * len(most)
        if proposal.draft_probs is not None:
            return proposal
        tokens, parents = proposal.tokens.clone(), proposal.parents
        if isinstance(parents, Tensor):
            parents = parents.clone()
        for slot, text in enumerate(self._slots):
            if text is None or (slot not in predictions and text.processing is None):
                continue
            line = parents[slot].tolist() if isinstance(parents, Tensor) else parents
            chain = predictions.get(slot)
            if chain is None and line is not None:
                pruned = _pruned(text, tokens[slot].tolist(), line)
                if any(token != PAD for token in pruned):
                    tokens[slot] = torch.tensor(pruned, dtype=torch.int32)
                    continue
                chain = []
            if chain is None:
                chain = list(takewhile(lambda token: token != PAD, tokens[slot].tolist()))
            legal = chain if text.processing is None else text.processing.continued(text.text, chain, most[slot])
            if slot in predictions:
                pairs = zip(predictions[slot], legal, strict=False)
                self.predicted[slot] = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            tokens[slot] = torch.tensor(_placed(legal, line, size=tokens.shape[1]), dtype=torch.int32)
            if isinstance(parents, Tensor):
                parents[slot] = torch.tensor(tree.chain(tokens.shape[1]), dtype=torch.int32)
        return Proposal(tokens, parents)

    def _others(
        self,
        commit: Commit,
        sampling: SamplingTensors,
        limits: RoundLimits,
        *,
        most: list[int],
        predictions: dict[int, list[int]],
    ) -> Proposal:
        max_accept = [0 if slot in predictions else limit for slot, limit in enumerate(most)]
        nodes = self.draft_shape.num_draft_tokens
        nothing = torch.full((len(most), nodes), PAD, dtype=torch.int32)
        end = self.max_positions
        if (
            not any(max_accept)
            or not self._inner.draft_shape.num_draft_tokens
            or (end is not None and limits.max_rows > end)
        ):
            parents: tuple[int, ...] | Tensor | None = self.draft_shape.parents
            if self.draft_shape.dynamic:
                parents = torch.tensor([tree.chain(nodes)] * len(most), dtype=torch.int32)
            return Proposal(nothing, parents)
        narrowed = limits if max_accept == most else replace(limits, max_accept=max_accept)
        if any(text is not None and text.processing is not None for text in self._slots):
            proposal = self._inner.propose_allowed(commit, sampling, narrowed, allowed=self._allowed)
        else:
            proposal = self._inner.propose(commit, sampling, narrowed)
        missing = nodes - proposal.tokens.shape[1]
        if missing and proposal.draft_probs is None:  # a chain shorter than it may be
            return replace(proposal, tokens=torch.nn.functional.pad(proposal.tokens, (0, missing), value=PAD))
        return proposal

    def _allowed(self, slot: int, drafts: list[int], size: int) -> Tensor | None:
        """Return the mask of tokens that may follow the sequence of a slot and these drafts; None = all."""
        text = self._slots[slot]
        if text is None or text.processing is None:
            return None
        return text.processing.allowed([*text.text, *drafts], size)


def _pruned(text: HostText, tokens: list[int], parents: Sequence[int]) -> list[int]:
    """Return the nodes of a tree, without those that may not follow and their descendants."""
    if text.processing is None:
        return tokens
    paths: list[list[int] | None] = []  # of every node that is kept
    for token, parent in zip(tokens, parents, strict=True):
        above = [] if parent == tree.ROOT else paths[parent]
        path = None if above is None or token == PAD else [*above, token]
        if path is not None and text.processing.continued(text.text, path, len(path)) != path:
            path = None
        paths.append(path)
    return [PAD if path is None else token for token, path in zip(tokens, paths, strict=True)]


def _placed(chain: Sequence[int], parents: Sequence[int] | None, *, size: int) -> list[int]:
    """A chain as the nodes of a proposal of ``size``; in a static tree along one of its deepest paths."""
    if parents is None or not isinstance(parents, tuple):
        return [*chain, *[PAD] * (size - len(chain))]
    deepest: list[list[int]] = []
    for node, parent in enumerate(parents):
        deepest.append([*([] if parent == tree.ROOT else deepest[parent]), node])
    path = max(deepest, key=len)
    nodes = [PAD] * size
    for node, token in zip(path, chain, strict=False):
        nodes[node] = token
    return nodes
