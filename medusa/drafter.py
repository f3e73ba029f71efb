"""Medusa heads as a drafter: the state behind the last committed token gives a tree of tokens in one step.

Every node is a rank in a head, so the tree is static; tokens are filled in each round. Ranks are of the law the target
would draw from at that place, its noise included (coupled drafting), as far as a head knows that law: at temperature 0
they are the head's best tokens. It has no cache and reads no commit but the last one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.core import reduce, tree
from paceline.core.errors import ConfigurationError
from paceline.core.types import Commit, DraftKey, FeatureSpec, Proposal, RoundLimits, SamplingTensors
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.kernels.protocol import Kernels
from paceline.medusa import checkpoint
from paceline.medusa.network import Heads
from paceline.medusa.tree import Choices

log = logging.getLogger("paceline")

TreeLike = Choices | str | Path | Iterable[Sequence[int]]


class MedusaStep(nn.Module):
    """From a commit's last state to the tokens of the tree."""

    place: Tensor

    def __init__(self, heads: Heads, kernels: Kernels, choices: Choices) -> None:
        super().__init__()
        self.heads, self._kernels, self._widths = heads, kernels, choices.widths
        ranks = max(choices.widths)
        places = [(len(path) - 1) * ranks + path[-1] for path in choices.paths]
        self.register_buffer("place", torch.tensor(places, dtype=torch.int32))

    def forward(
        self, tokens: Tensor, count: Tensor, start: Tensor, knobs: Tensor, keys: Tensor, features: Tensor
    ) -> tuple[Tensor]:
        """The fields of a Commit [B, W] with features [B, W, H], knobs [B, 4], keys [B, 2] -> drafts [B, N] int32."""
        last = (count - 1).to(torch.int64).view(-1, 1, 1).expand(-1, 1, features.shape[-1])
        levels = len(self._widths)
        logits = self.heads(features.gather(1, last).squeeze(1), self._kernels.linear, levels)
        depth = torch.arange(levels, dtype=torch.int32, device=tokens.device)
        positions = (start + count).unsqueeze(1) + depth  # of the tokens that the heads predict
        best = self._best(logits, positions, SamplingTensors(knobs, keys))
        return (best.flatten(1).index_select(1, self.place),)

    def _best(self, logits: Tensor, positions: Tensor, sampling: SamplingTensors) -> Tensor:
        """The tokens that each head puts first, second, ... logits [B, D, V] -> [B, D, R] int32.

        Chosen as the target chooses, again and again without those taken: the kernel knows the noise and the filters.
        """
        ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
        ranked = []
        for rank in range(max(self._widths)):
            # Levels at the end whose nodes have lower ranks only are left out.
            used = 1 + max(level for level, width in enumerate(self._widths) if width > rank)
            logits = logits[:, :used]
            picked = self._kernels.sample_tokens(logits.contiguous(), positions[:, :used], sampling)
            logits = torch.where(ids == picked.unsqueeze(-1), reduce.NEGATIVE, logits)
            ranked.append(nn.functional.pad(picked, (0, len(self._widths) - used)))
        return torch.stack(ranked, -1)


class MedusaDrafter:
    """Drafts a static tree with Medusa heads. A `paceline.core.protocols.TraceableDrafter`.

    heads    filled, for this target
    target   whose states they read; the drafter shares its kernels and, for tied heads, its output layer
    choices  the tree

    Raises:
        ConfigurationError: the tree needs more heads, or is wider than a window of the target can be.
    """

    max_positions: int | None = None

    def __init__(self, heads: Heads, target: CompiledDecoder, choices: Choices) -> None:
        choices.check(heads=heads.config.heads, top=heads.config.vocab_size)
        target.check_width(len(choices) + 1)
        self.heads, self.target, self.choices = heads.eval(), target, choices
        self.draft_shape = tree.draft_shape(choices.parents)
        self.reads: FeatureSpec | None = FeatureSpec()
        self._step = MedusaStep(heads, target.body.kernels, choices)
        ranks = hashlib.sha256(json.dumps(self.cache_key()).encode()).hexdigest()[:12]
        self._key = DraftKey("medusa", self.draft_shape, variant=ranks)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, target: CompiledDecoder, *, tree: TreeLike | None = None
    ) -> MedusaDrafter:
        """Load heads for a target.

        path    folder with the heads, in our layout, Medusa's or NxD Inference's
        target  the decoder they are for
        tree    choices, or a file of them; default: ``tree.json`` in the folder, else the best token of every head

        Raises:
            CheckpointError: the heads are not there, damaged, or for another target.
            ConfigurationError: the tree is not valid or needs more heads.
        """
        folder = Path(path)
        wanted = None if tree is None else _choices(tree)
        body, size = target.body, target.config.vocab_size
        heads = checkpoint.heads(folder, body.model.head, target.options.dtype, vocab_size=size, group=body.group)
        if wanted is None:
            beside = folder / checkpoint.TREE
            wanted = Choices.read(beside) if beside.is_file() else Choices.chain(heads.config.heads)
        return cls(heads, target, wanted)

    def shortened(self, length: int) -> MedusaDrafter:
        """See `paceline.core.protocols.Shortens`; of chains.

        Raises:
            ConfigurationError: the choices are a tree.
        """
        if not self.draft_shape.is_chain:
            raise ConfigurationError(
                f"a tree of {len(self.choices)} choices has one depth only; give one number as k, or a tree that is a "
                "chain, such as [[0], [0, 0]]"
            )
        return MedusaDrafter(self.heads, self.target, Choices(self.choices.paths[:length]))

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Nothing to read: the first commit brings the state behind the prompt."""

    def finish_request(self, slot: int) -> None:
        """Nothing is kept for a slot."""

    def update(self, commit: Commit) -> None:
        """Nothing to note: a proposal depends on the last commit alone."""

    def catch_up(self) -> None:
        """Nothing was missed."""

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        """Draft outside the target's graph; see the protocol."""
        states = commit.states
        if states is None:
            raise ConfigurationError(
                "Medusa heads read the target's states, and this commit has none; use the drafter in a "
                "SpeculativeGenerator with the target it was loaded for"
            )
        inputs = (commit.tokens, commit.count, commit.first_row, sampling.params, sampling.seeds, states)
        bucket = self.bucket(bounds.max_rows)
        key = GraphKey("draft", 1, bucket, commit_width=commit.tokens.shape[1], draft=self.step_key(bucket))
        (tokens,) = self.target.graph(
            key, lambda _body, _bucket: self._step, inputs, guest=self.cache_key, owner=self.state
        )(*inputs)
        return Proposal(tokens, None if self.draft_shape.is_chain else self.choices.parents)

    @property
    def state(self) -> nn.Module:
        """See the protocol."""
        return self.heads

    def bucket(self, rows: int) -> int:
        """See the protocol; the heads have no cache of their own."""
        return self.target.bucket_for(rows)

    def step(self, bucket: int) -> nn.Module:
        """See the protocol; the same for every length."""
        return self._step

    def step_key(self, bucket: int) -> DraftKey:
        """See the protocol; the heads have no cache of their own."""
        return self._key

    def cache_key(self) -> dict[str, object]:
        """See the protocol."""
        sizes = self.heads.config
        shape = [sizes.heads, sizes.layers, sizes.hidden_size, sizes.vocab_size, sizes.tied]
        dtype = str(next(iter(self.heads.own().values())).dtype)
        paths = [list(path) for path in self.choices.paths]
        return {"medusa": {"sizes": shape, "dtype": dtype, "choices": paths}}


def _choices(given: TreeLike) -> Choices:
    if isinstance(given, Choices):
        return given
    if isinstance(given, str | Path):
        return Choices.read(Path(given))
    if not isinstance(given, Iterable):
        raise ConfigurationError(
            f"tree={given!r} is no tree; give choices such as [[0], [0, 0], [1]], or a file of them"
        )
    return Choices.of(given)
