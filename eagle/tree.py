"""Shapes of a head's drafts: a chain, a tree of fixed shape, or the dynamic tree of EAGLE-2 (arXiv 2406.16858).

Shapes of a drafting graph never depend on data, only the parents of a dynamic tree do. Drafts are chosen with the
target's own noise of their position (coupled drafting): at any temperature the first child of a node is the target's
token if its distribution equals the head's. ``rows`` of a tree: consecutive rows of the head's cache that one call
writes.

Letters: B slots, n nodes of a level, H width of the head, U ids that can be drafted; V, N and D as elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.core import noise, reduce, tree
from paceline.core.errors import ConfigurationError
from paceline.core.types import DraftShape, SamplingKind, SamplingTensors
from paceline.decoder.kernels.protocol import Tree
from paceline.decoder.parallel.vocab_part import topk
from paceline.draft.heads import ChainStep, LevelTree, row_shift
from paceline.eagle.head import EagleHead, LastPair
from paceline.eagle.network import Qkv


class Chain:
    """Chain of ``length`` tokens; ``drawn``: sampled from the head's probabilities, for `Reject`."""

    def __init__(self, length: int, *, drawn: bool = False) -> None:
        self.draft_shape, self.drawn = DraftShape.chain(length), drawn
        self.rows = 1  # one row per step
        self.name = f"chain {length}" + (", drawn" if drawn else "")

    def step(self, head: EagleHead, bucket: int, kind: SamplingKind) -> nn.Module:
        kind_of_step = ChainStep if head.config.mask_token is None else OnePassStep
        return kind_of_step(head, self.draft_shape.num_draft_tokens, bucket, drawn=self.drawn, kind=kind)


class OnePassStep(nn.Module):
    """P-EAGLE: read a commit and draft ``k`` positions in one pass of the head; the drafts do not read each other.

    ``drawn`` and ``kind`` as in `ChainStep`. ``parents``: of a tree of the best tokens of each position; (): a chain.
    """

    def __init__(
        self,
        head: EagleHead,
        k: int,
        bucket: int,
        *,
        kind: SamplingKind,
        drawn: bool = False,
        parents: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.head, self._k, self._bucket, self._drawn, self._kind = head, k, bucket, drawn, kind
        self._most, nodes = tree.best_of_positions(parents) if parents else (0, [])
        self.register_buffer("nodes", torch.tensor(nodes, dtype=torch.int32))

    def forward(
        self, tokens: Tensor, count: Tensor, first_row: Tensor, params: Tensor, seeds: Tensor, features: Tensor
    ) -> tuple[Tensor, ...]:
        """The inputs of a `ChainStep` -> drafts [B, N] int32, and their probabilities [B, N, V] if they are sampled."""
        head, sampling = self.head, SamplingTensors(params, seeds, self._kind)
        window = tokens.shape[1] + self._k - 1
        place = head.place(first_row - row_shift(head), window, self._bucket, sampling=sampling)
        hidden = head.ahead(tokens.clamp(min=0), count, features, place=place, k=self._k, sampling=sampling)
        ahead = torch.arange(self._k, dtype=torch.int32, device=tokens.device)
        positions = (first_row + count).unsqueeze(1) + ahead
        if self._most:
            tokens = head.rank_tokens(hidden, positions, sampling, count=self._most)[0]
            return (tokens.flatten(1).index_select(1, self.get_buffer("nodes")),)
        if not self._drawn:
            return (head.sample_tokens(hidden, positions, sampling),)
        logits = head.logits(hidden).contiguous()
        drafts = head.kernels.sample_tokens(logits, positions, sampling, stream=noise.DRAFT)
        return drafts, head.kernels.probabilities(logits, sampling)


class TreeStep(nn.Module):
    """Read a commit with its features, then grow a tree of drafts from its last pair. ``kind``: sampling mode of its
    rounds.
    """

    def __init__(
        self, head: EagleHead, draft_tree: StaticTree | DynamicTree, bucket: int, *, kind: SamplingKind = "full"
    ) -> None:
        super().__init__()
        self.head, self.draft_tree, self._bucket, self._kind = head, draft_tree, bucket, kind

    def forward(
        self, tokens: Tensor, count: Tensor, first_row: Tensor, params: Tensor, seeds: Tensor, features: Tensor
    ) -> tuple[Tensor, ...]:
        """The inputs of a `ChainStep`, features among them -> outputs of the tree."""
        sampling = SamplingTensors(params, seeds, self._kind)
        place = self.head.place(first_row - row_shift(self.head), tokens.shape[1], self._bucket, sampling=sampling)
        root = self.head.last_pair(tokens.clamp(min=0), features, place, last=count - 1)
        drafts: tuple[Tensor, ...] = self.draft_tree(self.head, root, sampling, self._bucket)
        return drafts


class StaticTree(LevelTree):
    """A tree of fixed shape: child r of a node is the head's token of rank r."""

    def __init__(self, parents: tuple[int, ...]) -> None:
        super().__init__(parents)
        self.name = f"tree {'.'.join(map(str, parents))}"

    def step(self, head: EagleHead, bucket: int, kind: SamplingKind) -> nn.Module:
        if head.config.mask_token is not None:
            return OnePassStep(head, self.draft_shape.depth, bucket, parents=self.parents, kind=kind)
        return TreeStep(head, self, bucket, kind=kind)

    def forward(self, head: EagleHead, root: LastPair, sampling: SamplingTensors, bucket: int) -> tuple[Tensor, ...]:
        """Grow the tree from its root -> drafts [B, N] int32."""
        frontier = TreeFrontier(head, root, bucket, sampling=sampling)
        return (
            self.grown(head.rank_tokens, root.hidden, frontier.extend, position=_positions(root), sampling=sampling),
        )


class DynamicTree(nn.Module):
    """EAGLE-2: expand the ``width`` likeliest nodes of every level, then keep the ``nodes`` likeliest of all.

    A node's log-probability is the sum of the head's on its path; with noise, of the distribution given the noise. A
    child is never likelier than its parent and comes after it, so the kept nodes are connected.
    """

    def __init__(self, nodes: int, *, depth: int, width: int) -> None:
        super().__init__()
        most = width + (depth - 1) * width * width
        if min(nodes, depth, width) < 1 or not depth <= nodes <= most:
            raise ConfigurationError(
                f"draft_tree: expected {depth} to {most} nodes for a dynamic tree of depth {depth} and width "
                f"{width}, got {nodes}; correct the number"
            )
        self.draft_shape = DraftShape(nodes, depth, None, dynamic=True)
        self.rows = 1 + width * (depth - 1)  # the root and expanded nodes; more than the kept ones if the tree is deep
        self.width, self.name = width, f"dynamic {nodes} of depth {depth}, width {width}"
        self.register_buffer("owner", torch.arange(width * width, dtype=torch.int32) // width)
        self.register_buffer("same", torch.eye(width))

    def step(self, head: EagleHead, bucket: int, kind: SamplingKind) -> nn.Module:
        return TreeStep(head, self, bucket, kind=kind)

    def forward(self, head: EagleHead, root: LastPair, sampling: SamplingTensors, bucket: int) -> tuple[Tensor, ...]:
        """Grow the tree from its root -> drafts [B, N] int32, parents [B, N] int32."""
        slots, width = len(root.row), self.width
        frontier, hidden = TreeFrontier(head, root, bucket, sampling=sampling), root.hidden
        # A matmul with the identity is exact, and its result is computed once: see `best`.
        logprob, tokens = best(head, hidden, width, sampling=sampling, positions=_positions(root))
        logprob, tokens = head.kernels.linear(logprob, self.get_buffer("same")).squeeze(1), tokens.squeeze(1)
        steps = torch.arange(width, dtype=torch.int32, device=tokens.device).expand(slots, -1)
        ids, rows, hidden = steps, torch.zeros_like(steps), hidden.expand(-1, width, -1)
        every = [(tokens, logprob, torch.full_like(tokens, tree.ROOT))]
        for level in range(2, self.draft_shape.depth + 1):
            hidden = frontier.extend(tokens, hidden, rows)
            more, picks = best(head, hidden, width, sampling=sampling, positions=_positions(root, level))
            more = head.kernels.linear(more, self.get_buffer("same"))
            value, token = (logprob.unsqueeze(-1) + more).flatten(1), picks.flatten(1)
            owner = self.get_buffer("owner").expand(slots, -1).to(torch.int64)
            every.append((token, value, ids.gather(1, owner)))
            if level < self.draft_shape.depth:
                logprob, chosen = reduce.top(value, width)
                chosen = chosen.to(torch.int64)
                above = owner.gather(1, chosen)
                rows = (above + (1 + (level - 2) * width)).to(torch.int32)
                tokens, ids = token.gather(1, chosen), chosen.to(torch.int32) + (width + (level - 2) * width * width)
                hidden = hidden.gather(1, above.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        return kept(
            *(torch.cat(parts, 1) for parts in zip(*every, strict=True)), nodes=self.draft_shape.num_draft_tokens
        )


DraftTree = Chain | StaticTree | DynamicTree

_FORMS = (
    "'chain' (of k tokens), 'tree:PARENTS', e.g. tree:-1,-1,0,0, or 'dynamic:NODES,DEPTH,WIDTH', e.g. dynamic:16,4,4"
)


def parse_draft_tree(draft_tree: object, *, k: int, drawn: bool = False) -> DraftTree:
    """Parse a draft tree, or the name of one; ``k`` tokens for a chain. ``drawn``: sampled from the head's
    probabilities, for acceptor="reject".
    """
    if isinstance(draft_tree, DraftTree):
        return draft_tree
    kind, _, arguments = (draft_tree if isinstance(draft_tree, str) else "").partition(":")
    if kind == "chain" and not arguments:
        return Chain(k, drawn=drawn)
    if drawn:
        raise ConfigurationError(
            "draft_tree: expected 'chain' for acceptor='reject', since only chains can be sampled from the head's "
            "probabilities, got a tree; use draft_tree='chain', or acceptor='match', which is exact for trees too"
        )
    try:
        numbers = tuple(int(part) for part in arguments.split(","))
    except ValueError:
        numbers = ()
    if kind == "tree" and numbers:
        return StaticTree(numbers)
    if kind == "dynamic" and len(numbers) == 3:
        return DynamicTree(numbers[0], depth=numbers[1], width=numbers[2])
    raise ConfigurationError(f"draft_tree: expected {_FORMS}, got {draft_tree!r}; correct it")


class TreeFrontier:
    """The inner nodes of a growing tree. Their queries, keys and values are kept, so that each is multiplied once.

    A level's attention runs over the whole window again, from the root's row on, because a cache row's ancestors are
    not the rows before it; that is cheap compared with the matmuls.
    """

    def __init__(self, head: EagleHead, root: LastPair, bucket: int, *, sampling: SamplingTensors) -> None:
        self._head, self._root, self._bucket, self._sampling = head, root, bucket, sampling
        self._qkv = list(root.qkv)
        self._parents = torch.full_like(root.row, -1).unsqueeze(1)
        self._level = 0

    def extend(self, tokens: Tensor, hidden: Tensor, parents: Tensor) -> Tensor:
        """Add a level. tokens [B, n], hidden [B, n, H] and rows ``parents`` [B, n] of their parents -> [B, n, H]."""
        self._level += 1
        head, count = self._head, tokens.shape[1]
        positions = _positions(self._root, self._level - 1).expand(-1, count)
        self._parents = torch.cat([self._parents, parents], 1)
        ancestry = Tree.of(self._parents)
        place = head.place(self._root.row, self._parents.shape[1], self._bucket, tree=ancestry, sampling=self._sampling)

        def attend(layer: int, qkv: Qkv) -> Tensor:
            q, k, v = (torch.cat(pair, 1) for pair in zip(self._qkv[layer], qkv, strict=True))
            self._qkv[layer] = (q, k, v)
            return head.attend(layer, self._qkv[layer], place)[:, -count:]

        return head.run(tokens, hidden, attend, positions=positions, real=head.real_rows(self._sampling, count))


def best(
    head: EagleHead, hidden: Tensor, count: int, *, sampling: SamplingTensors, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the likeliest next tokens of nodes of one level. hidden [B, n, H], positions [B, 1] int32 of the drafted
    tokens.

    -> logprob [B, n, count], with a temperature, given the position's noise; tokens [B, n, count] int32, the
    target's ids, the first of them the token of a chain.
    """
    at = positions.expand(-1, hidden.shape[1]).contiguous()
    tokens, logprob = head.rank_tokens(hidden, at, sampling, count=count)
    return logprob, tokens


def kept(tokens: Tensor, logprob: Tensor, parents: Tensor, *, nodes: int) -> tuple[Tensor, Tensor]:
    """Return the ``nodes`` likeliest candidates in the order of their creation, so that parents come first.

    tokens, parents [B, M] int32 (-1 = the root), logprob [B, M] -> tokens, parents [B, nodes] int32
    """
    chosen = reduce.first_of_largest(logprob, topk(logprob, nodes)[0][:, -1:], nodes)
    rank = chosen.to(torch.float32).cumsum(-1) - 1.0
    places = torch.arange(nodes, dtype=torch.float32, device=logprob.device).view(1, -1, 1)
    one_hot = ((rank.unsqueeze(1) == places) & chosen.unsqueeze(1)).to(torch.float32)
    token, parent = ((one_hot * x.to(torch.float32).unsqueeze(1)).sum(-1).to(torch.int32) for x in (tokens, parents))
    above = rank.gather(1, parent.clamp(min=0).to(torch.int64)).to(torch.int32)
    above = torch.where(parent < 0, tree.ROOT, above)
    before = torch.arange(-1, nodes - 1, dtype=torch.int32, device=logprob.device)
    return token, torch.where(above < before, above, before)


def _positions(root: LastPair, ahead: int = 1) -> Tensor:
    """Position of the token ``ahead`` places after the last committed one. [B, 1] int32"""
    return (root.row + (1 + ahead)).unsqueeze(1)
