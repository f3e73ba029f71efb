"""Medusa heads as a drafter: one step from the hidden state at the last committed token to a tree of tokens.

Every node is a rank in a head, so the tree is static; tokens are filled in each round. Ranks are those of the
distribution from which the target would sample at that position, its noise included (coupled drafting), as predicted by
a head: at temperature 0 they are the head's best tokens. There is no cache.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.core import tree
from paceline.core.types import DraftKey, SamplingKind, SamplingTensors
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.options import DecoderOptions
from paceline.decoder.parallel.vocab_parallel import rank
from paceline.decoder.weights.hub import checkpoint_path
from paceline.decoder.weights.quantize import MatrixLike
from paceline.draft.heads import HeadDrafter, ParallelHead, ParallelStep
from paceline.medusa import checkpoint
from paceline.medusa.network import Heads
from paceline.medusa.tree import Choices, TreeLike, parse_choices, shipped_choices


class MedusaHead(ParallelHead):
    """All heads together as one parallel drafting head."""

    def __init__(self, heads: Heads, kernels: Kernels, options: DecoderOptions) -> None:
        super().__init__(kernels, options)
        self.heads = heads

    def real_rows(self, sampling: SamplingTensors, window: int) -> Tensor | None:
        return self.seated_rows(sampling, window)

    def parallel(self, state: Tensor, k: int, seated: Tensor | None = None) -> Tensor:
        """Compute logits, as `ParallelHead.parallel`; for a sharded target, those of this rank's ids (`Heads.part`).

        seated  [B] int32, 0 for slots that need not be computed; None: all are
        """

        def linear(x: Tensor, weight: MatrixLike) -> Tensor:
            if seated is None:
                return self.kernels.linear(x, weight)
            rows = x if x.dim() > 2 else x.unsqueeze(1)
            return self.kernels.linear(rows, weight, seated * rows.shape[1]).view(*x.shape[:-1], -1)

        return self.heads.scores(state, linear, k)


class MedusaStep(ParallelStep):
    """Step from a commit's last state to the tokens of the tree. ``kind``: sampling mode of its rounds."""

    index: Tensor
    head: MedusaHead

    def __init__(self, head: MedusaHead, choices: Choices, *, kind: SamplingKind = "full") -> None:
        super().__init__(head, choices.depth, kind=kind)
        self._widths = choices.widths
        ranks = max(choices.widths)
        index = [(len(path) - 1) * ranks + path[-1] for path in choices.paths]
        self.register_buffer("index", torch.tensor(index, dtype=torch.int32))

    def scores(self, state: Tensor, sampling: SamplingTensors) -> Tensor:
        return self.head.parallel(state, self._k, self.head.real_rows(sampling, 1))

    def choose(self, logits: Tensor, positions: Tensor, sampling: SamplingTensors) -> Tensor:
        count, part = max(self._widths), self.head.heads.part(logits)
        ranked, _ = rank(logits.contiguous(), positions, sampling, count=count, part=part, kernels=self.head.kernels)
        return ranked.flatten(1).index_select(1, self.index)


class MedusaDrafter(HeadDrafter):
    """Drafts a static tree with Medusa heads.

    heads    filled, for this target
    target   source of the hidden states; the drafter shares its kernels and, for tied heads, its output layer
    choices  the tree; ConfigurationError: it needs more heads, or is wider than a window of the target can be
    """

    def __init__(self, heads: Heads, target: CompiledDecoder, choices: Choices) -> None:
        choices.check(heads=heads.config.heads, top=heads.config.vocab_size)
        head = MedusaHead(heads, target.body.kernels, target.options)
        super().__init__(head, target, tree.draft_shape(choices.parents))
        self.head: MedusaHead = head
        self.heads, self.choices = heads, choices
        ranks = hashlib.sha256(json.dumps(self.cache_key()).encode()).hexdigest()[:12]
        self._key = DraftKey("medusa", self.draft_shape, variant=ranks)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, target: CompiledDecoder, *, draft_tree: TreeLike | None = None
    ) -> MedusaDrafter:
        """Load heads for a target.

        path        folder with the heads, in our layout, Medusa's or NxD Inference's, or an id of the Hugging Face hub
        target      the decoder they are for
        draft_tree  choices, or a file of them; default: ``tree.json`` in the folder, else the best token of every head

        Raises:
            CheckpointError: the heads do not exist, are damaged, or are for another target.
            ConfigurationError: the tree is not valid or needs more heads.
        """
        folder = checkpoint_path(path)
        choices = None if draft_tree is None else parse_choices(draft_tree)
        shared_head, size = target.body.shared, target.config.vocab_size
        heads = checkpoint.heads(
            folder,
            shared_head.head,
            target.options.dtype,
            vocab_size=size,
            group=shared_head.group,
            ids=shared_head.ids,
        )
        choices = choices or shipped_choices(folder) or Choices.chain(heads.config.heads)
        return cls(heads, target, choices)

    @property
    def state(self) -> nn.Module:
        return self.heads

    def shortened(self, length: int) -> MedusaDrafter:
        super().shortened(length)
        return MedusaDrafter(self.heads, self.decoder, Choices(self.choices.paths[:length]))

    def step(self, bucket: int, kind: SamplingKind) -> nn.Module:
        return MedusaStep(self.head, self.choices, kind=kind)

    def step_key(self, bucket: int) -> DraftKey:
        return self._key

    def cache_key(self) -> dict[str, object]:
        sizes = self.heads.config
        shape = [sizes.heads, sizes.layers, sizes.hidden_size, sizes.vocab_size, sizes.tied]
        dtype = str(next(iter(self.heads.own().values())).dtype)
        paths = [list(path) for path in self.choices.paths]
        return {"medusa": {"sizes": shape, "dtype": dtype, "choices": paths}}
