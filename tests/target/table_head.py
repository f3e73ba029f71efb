"""A head whose distribution is a table, under the real growth of trees (`paceline.eagle.tree`); no tests."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from paceline.core.types import DraftKey, SamplingKind, SamplingTensors
from paceline.decoder.kernels.protocol import CachePosition
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.options import DecoderOptions, LoadOptions
from paceline.draft.heads import DraftHead, HeadDrafter
from paceline.eagle.head import LastPair
from paceline.eagle.network import Attend
from paceline.eagle.tree import DynamicTree, StaticTree
from tests.fakes import TableDecoder


class TableHead(DraftHead):
    """Stands for `paceline.eagle.head.EagleHead`: a hidden state is a token, and logits [V, V] give what follows it.

    It reads tokens alone and attends to nothing, so that its distribution is known at every node.
    """

    def __init__(self, logits: Tensor, slots: int) -> None:
        super().__init__(TorchKernels(), DecoderOptions(LoadOptions(batch_size=slots, amp="f32"), (24,), (8, 16)))
        self.register_buffer("table", logits)
        self.ids = torch.arange(len(logits), dtype=torch.int32)
        self.config = SimpleNamespace(mask_token=None)

    def step(self, k: int, bucket: int, kind: SamplingKind) -> nn.Module:
        raise NotImplementedError("a tree makes its own step")

    def place(self, row: Tensor, count: int, bucket: int, **_: object) -> CachePosition:
        return CachePosition(row, torch.full_like(row, count), self.slots, bucket)

    def last_pair(self, tokens: Tensor, _features: Tensor, place: CachePosition, *, last: Tensor) -> LastPair:
        """A pair's row is one less than its token's."""
        hidden = tokens.gather(1, last.long().unsqueeze(1)).to(torch.float32).unsqueeze(-1)
        return LastPair(hidden, ((hidden, hidden, hidden),), place.row + last - 1)

    def run(self, tokens: Tensor, _hidden: Tensor, attend: Attend, **_: object) -> Tensor:
        stream = tokens.to(torch.float32).unsqueeze(-1)
        attend(0, (stream, stream, stream))
        return stream

    def attend(self, _layer: int, qkv: tuple[Tensor, Tensor, Tensor], _place: CachePosition) -> Tensor:
        return qkv[0]

    def scores(self, hidden: Tensor) -> Tensor:
        return self.get_buffer("table")[hidden.squeeze(-1).long()]

    def rank_tokens(
        self, hidden: Tensor, positions: Tensor, sampling: SamplingTensors, *, count: int
    ) -> tuple[Tensor, Tensor]:
        return self.kernels.rank_tokens(self.scores(hidden), positions, sampling, count=count)


class TableTreeDrafter(HeadDrafter):
    """Drafts with a `TableHead`, as `paceline.eagle.drafter.EagleDrafter` does with a real one."""

    def __init__(self, logits: Tensor, draft_tree: StaticTree | DynamicTree, slots: int) -> None:
        decoder = TableDecoder(logits.expand(len(logits), -1, -1), slots=slots, kv_buckets=(24,))
        super().__init__(TableHead(logits, slots), decoder, draft_tree.draft_shape)
        self.draft_tree = draft_tree

    def step(self, bucket: int, kind: SamplingKind) -> nn.Module:
        return NoFeatures(self.draft_tree.step(self.head, bucket, kind))  # type: ignore[arg-type]

    def step_key(self, bucket: int) -> DraftKey:
        return DraftKey("table", self.draft_shape, variant=self.draft_tree.name)


class NoFeatures(nn.Module):
    """The step of a tree whose head reads no features."""

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self._step = step

    def forward(self, *commit: Tensor) -> tuple[Tensor, ...]:
        drafts: tuple[Tensor, ...] = self._step(*commit, commit[0])
        return drafts
