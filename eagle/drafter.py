"""EAGLE as a drafter: a pass over the last commit's real features, then drafts that grow from its last pair.

Each round writes the head's cache anew from the target's features (EAGLE, arXiv 2401.15077), so that old drafts leave
no trace: after any number of rounds the cache is that of one pass over the committed text. The first drafts come
from that same pass. Not here: the shape of growth (`paceline.eagle.tree`) and the verifier.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.core.errors import ConfigurationError
from paceline.core.pending import PendingCommits
from paceline.core.types import Commit, DraftKey, FeatureSpec, Proposal, RoundLimits, SamplingTensors
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.kernels.protocol import CachePosition
from paceline.decoder.weights.files import check_finite
from paceline.eagle import checkpoint
from paceline.eagle.head import EagleHead
from paceline.eagle.tree import Chain, DraftTree, LastPair


class EagleStep(nn.Module):
    """Read a commit with its features, then grow drafts."""

    def __init__(self, head: EagleHead, growth: DraftTree, reach: int) -> None:
        super().__init__()
        self.head, self.growth, self._reach = head, growth, reach

    def forward(
        self, tokens: Tensor, count: Tensor, start: Tensor, knobs: Tensor, keys: Tensor, features: Tensor
    ) -> tuple[Tensor, ...]:
        """The fields of a Commit [B, W], knobs [B, 4], keys [B, 2], features [B, W, F] -> what the growth gives.

        ``features[:, i]`` predicted ``tokens[:, i]``: the two are the pair of the place before that token.
        """
        head = self.head
        first = head.row(start - 1)
        steps = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
        hidden = head.fuse(features)
        stream, qkv = head.project(tokens.clamp(min=0), hidden, first.unsqueeze(1) + steps)
        mixed = head.attend(qkv, head.place(first, tokens.shape[1], reach=self._reach))
        stream, mixed, *ours = (_at(x, count - 1) for x in (stream, mixed, *qkv))
        root = LastPair(head.layer.finish(stream, mixed), (ours[0], ours[1], ours[2]), head.row(start + count - 2))
        made: tuple[Tensor, ...] = self.growth(head, root, SamplingTensors(knobs, keys), self._reach)
        return made


class ReadStep(nn.Module):
    """Read pairs of a text into one slot. One layer's cache needs no more than their keys and values."""

    def __init__(self, head: EagleHead, reach: int) -> None:
        super().__init__()
        self.head, self._reach = head, reach

    def forward(self, tokens: Tensor, features: Tensor, row: Tensor, count: Tensor, slot: Tensor) -> tuple[Tensor]:
        """tokens [1, chunk] int32, features [1, chunk, F]; row, count, slot [1] int32 -> the row behind."""
        place = CachePosition(row, count, slot, self._reach, padded=True)
        steps = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
        hidden = self.head.fuse(features, count)
        _, qkv = self.head.project(tokens, hidden, row.unsqueeze(1) + steps, real=count)
        self.head.attend(qkv, place)
        return (row + count,)


class EagleDrafter:
    """Drafts with an EAGLE head on a target's features. A `paceline.core.protocols.TraceableDrafter`.

    Its graphs are compiled, kept and shipped with the target's, whose options (slots, positions, number format) it has.
    """

    def __init__(self, head: EagleHead, target: CompiledDecoder, growth: DraftTree) -> None:
        if not isinstance(growth, DraftTree):
            raise ConfigurationError(f"growth={growth!r} is none; give Chain(k), StaticTree(paths) or DynamicTree(...)")
        head.config.check_target(target.config)
        target.check_width(growth.draft_shape.num_draft_tokens + 1)
        room = target.options.rows - target.n_positions
        if growth.rows > room:
            raise ConfigurationError(
                f"drafts that grow as {growth.name} take {growth.rows} cache rows while they grow, and there are "
                f"{room} behind the last position; take less width or less depth"
            )
        self.head, self.target, self.growth = head.eval(), target, growth
        self.draft_shape = growth.draft_shape
        self.reads: FeatureSpec | None = head.config.reads
        self.max_positions: int | None = min(target.n_positions, head.config.max_position_embeddings)
        self._backlog = PendingCommits()

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        target: CompiledDecoder,
        growth: DraftTree | None = None,
    ) -> EagleDrafter:
        """Load a head for ``target``, which lends it its embedding and, to version 1, its output layer.

        path    folder in the layout of the EAGLE repository, NxD Inference, speculators, or our own
        growth  how drafts grow; default: a chain of 4

        Raises:
            CheckpointError: the folder cannot be used, or its weights not in the target's number format.
            PairingError: the head is for another target.
            ConfigurationError: the growth does not fit.
        """
        model = target.body.model
        # Over a divided target this is rank 0, whose rows are the first: copies of those are taken for copies of all.
        rows = min(len(model.head), target.config.vocab_size)
        found = checkpoint.load(Path(path), target.config, head=model.head[:rows])
        dtype = target.options.dtype
        where = Path(path)
        weights = {n: x if n == "ids" else check_finite(n, x, dtype, where=where) for n, x in found.weights.items()}
        embedding = (
            None if found.embedding is None else check_finite("its embedding", found.embedding, dtype, where=where)
        )
        if embedding is not None and torch.equal(embedding[:rows], model.embedding[:rows]):
            embedding = None
        head = EagleHead(
            found.config,
            weights,
            lent=target.body.lent,
            embedding=embedding,
            kernels=target.backend.kernels,
            options=target.options,
        )
        return cls(head, target, growth or Chain(4))

    def shortened(self, length: int) -> EagleDrafter:
        """See `paceline.core.protocols.Shortens`; of chains.

        Raises:
            ConfigurationError: this head's drafts grow as trees.
        """
        if not isinstance(self.growth, Chain):
            raise ConfigurationError(
                f"drafts that grow as {self.growth.name} have one depth only; give one number as k, or take a chain"
            )
        made = copy.copy(self)
        made.growth = Chain(length, drawn=self.growth.drawn)
        made.draft_shape = made.growth.draft_shape
        return made

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Read the pairs of a prompt: all but its last feature, whose token is yet to come."""
        self._backlog.forget(slot)
        assert features is not None, "the verifier gives the features that `reads` asks for"
        self._read(slot, 0, tokens=prompt[1:], features=features)

    def finish_request(self, slot: int) -> None:
        """Its commits are of no interest any more; the next request's pairs overwrite the cache rows."""
        self._backlog.forget(slot)

    def update(self, commit: Commit) -> None:
        """Only noted: the step reads the last commit itself."""
        self._backlog.add(commit)

    def catch_up(self) -> None:
        """Read what was committed while nothing was proposed."""
        for missed in self._backlog.take():
            assert missed.features is not None, "commits carry the features that `reads` asks for"
            self._read(missed.slot, missed.first_row - 1, tokens=missed.tokens, features=missed.features)

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        """Draft; see the protocol."""
        self.catch_up()
        states = commit.states
        assert states is not None, "commits carry the features that `reads` asks for"
        inputs = (commit.tokens, commit.count, commit.first_row, sampling.params, sampling.seeds, states)
        bucket, width = self.bucket(bounds.max_rows), commit.tokens.shape[1]
        key = GraphKey("draft", width, bucket, commit_width=width, draft=self.step_key(bucket))
        step = self.target.graph(
            key, lambda _body, rows: self.step(rows), inputs, guest=self.cache_key, owner=self.state
        )
        out = step(*inputs)
        if self.draft_shape.dynamic:
            return Proposal(out[0], out[1])
        return Proposal(out[0], self.draft_shape.parents, out[1] if len(out) > 1 else None)

    @property
    def state(self) -> nn.Module:
        """See the protocol."""
        return self.head

    def bucket(self, rows: int) -> int:
        """See the protocol."""
        return self.target.bucket_for(rows + self.draft_shape.depth)

    def step(self, bucket: int) -> nn.Module:
        """See the protocol."""
        return EagleStep(self.head, self.growth, bucket)

    def step_key(self, bucket: int) -> DraftKey:
        """See the protocol."""
        return DraftKey(f"eagle{self.head.config.version}", self.draft_shape, bucket, variant=self.growth.name)

    def cache_key(self) -> dict[str, object]:
        """See the protocol. The growth is in `step_key`: graphs that only read a text do not depend on it."""
        own = self.head.embedding is not self.target.body.model.embedding
        config: dict[str, object] = json.loads(json.dumps(asdict(self.head.config)))
        return {"eagle": config, "own embedding": own}

    def _read(self, slot: int, row: int, *, tokens: Sequence[int], features: Tensor) -> None:
        """Pairs of tokens and the features [>= n, F] that predicted them, from cache row ``row`` on, in chunks."""
        done, chunks = 0, self.target.options.chunks
        while done < len(tokens):
            left = len(tokens) - done
            chunk = next((c for c in chunks if c >= left), chunks[-1])
            count = min(chunk, left)
            part = list(tokens[done : done + count]) + [0] * (chunk - count)
            known = nn.functional.pad(features[done : done + count], (0, 0, 0, chunk - count))
            numbers = [torch.tensor([n], dtype=torch.int32) for n in (row + done, count, slot)]
            inputs = (torch.tensor([part], dtype=torch.int32), known.unsqueeze(0), *numbers)
            bucket = self.target.bucket_for(row + done + chunk)
            key = GraphKey("read", chunk, bucket, variant=f"eagle{self.head.config.version}")
            self.target.graph(
                key, lambda _body, r: ReadStep(self.head, r), inputs, guest=self.cache_key, owner=self.state
            )(*inputs)
            done += count


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Row ``index`` [B] of x [B, n, ...] -> [B, 1, ...]."""
    at = index.to(torch.int64).view(-1, *[1] * (x.dim() - 1)).expand(-1, 1, *x.shape[2:])
    return x.gather(1, at)
