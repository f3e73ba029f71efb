"""IBM's MLP speculator (Wertheimer et al., arXiv 2404.19124): a chain of small recurrent stages.

Stage i turns a state and the embedding of the last token into the next state, ``gelu(norm(proj state + c emb token))``,
and its own output layer turns that into logits. The first state is the target's last hidden state. There is no cache.
Files: ibm-ai-platform/*-accelerator, ibm-granite/*-accelerator.

Letters: B slots, W tokens of a commit, H width of the target, I of the stages, V vocabulary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.core.errors import CheckpointError, ConfigurationError
from paceline.core.types import DraftShape, FeatureSpec, SamplingKind, SamplingTensors
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.options import MAX_WIDTH, DecoderOptions
from paceline.decoder.weights.hub import checkpoint_path
from paceline.draft.heads import DraftHead, Extend, HeadDrafter, LevelTree, Rank, at_index
from paceline.draft.options import parse_draft_tree
from paceline.heads.checkpoint import as_dtype, check, read
from paceline.heads.layouts import HeadKeys, MustBe, check_target, read_config
from paceline.heads.options import Wanted

_EPS = 1e-6
_KEYS = HeadKeys(
    "an MLP speculator",
    {
        *("vocab_size", "emb_dim", "inner_dim", "n_predict", "tie_weights", "scale_input"),
        *("n_candidates", "top_k_tokens_per_head", "num_lookahead_tokens"),  # of the trees of other programs
        *("base_model_name_or_path", "hidden_size"),  # the latter: another name of emb_dim
    },
    {
        "model_type": MustBe(("mlp_speculator",), "it is another kind of head"),
        "architectures": MustBe((["MLPSpeculatorPreTrainedModel"],), "it is another network under the same keys"),
    },
)


@dataclass(frozen=True, slots=True)
class MlpSpeculatorConfig:
    """Sizes of a speculator.

    stages       the most tokens it drafts
    inner_size   I
    tied         stages share their weights, but for the first projection
    scale_input  the target's state is normalised first
    """

    stages: int
    hidden_size: int
    inner_size: int
    vocab_size: int
    tied: bool
    scale_input: bool

    @classmethod
    def read(cls, folder: Path, target: ModelConfig) -> MlpSpeculatorConfig:
        fields = read_config(folder)
        _KEYS.check(fields)
        size = fields.integer("emb_dim", fields.integer("hidden_size", 4096))
        made = cls(
            stages=fields.integer("n_predict", 3),
            hidden_size=size,
            inner_size=fields.integer("inner_dim", 0, minimum=0) or size,
            vocab_size=fields.integer("vocab_size", 32000),
            tied=fields.flag("tie_weights", False),
            scale_input=fields.flag("scale_input", False),
        )
        check_target("MLP speculator", target, vocab_size=made.vocab_size, hidden_size=made.hidden_size)
        if made.stages >= MAX_WIDTH:
            raise CheckpointError(
                f"{fields.where}: n_predict: expected less than {MAX_WIDTH}, got {made.stages}; correct it"
            )
        if made.tied and made.stages == 1:
            raise CheckpointError(f"{fields.where}: tie_weights: expected false for one stage, got true; correct it")
        return made

    def stage(self, part: str, index: int) -> str:
        """The name of a stage's module."""
        first = min(index, 1 if part == "proj" else 0)
        return f"{part}.{first if self.tied else index}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        inner, shapes = self.inner_size, dict[str, tuple[int, ...]]()
        for index in range(self.stages):
            shapes[f"{self.stage('emb', index)}.weight"] = (self.vocab_size, inner)
            shapes[f"{self.stage('proj', index)}.weight"] = (inner, inner if index else self.hidden_size)
            shapes[f"{self.stage('head', index)}.weight"] = (self.vocab_size, inner)
            for kind in ("weight", "bias"):
                shapes[f"{self.stage('ln', index)}.{kind}"] = (inner,)
        return shapes


def load(folder: Path, target: ModelConfig) -> tuple[MlpSpeculatorConfig, dict[str, Tensor]]:
    """Read a folder: sizes, and tensors by the names of `MlpSpeculatorConfig.shapes`."""
    config = MlpSpeculatorConfig.read(folder, target)
    found = {name.removeprefix("speculator."): x for name, x in read(folder).items()}
    weights = dict(found)
    for part in ("emb", "proj", "head", "ln") if config.tied else ():
        for index in range(config.stages):
            own, kept = f"{part}.{index}", config.stage(part, index)
            for kind in ("weight", "bias") if own != kept else ():
                copy = weights.pop(f"{own}.{kind}", None)
                if copy is not None and not torch.equal(copy, found.get(f"{kept}.{kind}", copy[:0])):
                    raise CheckpointError(
                        f"{folder}: expected {own}.{kind} equal to {kept}.{kind}, since tie_weights is true, got "
                        "another tensor; download the checkpoint again, or correct its config.json"
                    )
    check(folder, weights, config.shapes())
    return config, weights


def draft_shape(target: ModelConfig, wanted: Wanted, folder: Path, *, draft_tree: str = "chain") -> DraftShape:
    """Check the config.json and the tree; return the shape of its drafts. Errors as in `MlpSpeculatorConfig.read` and
    `parse_draft_tree`.

    Raises:
        ConfigurationError: the tree is deeper than there are stages.
    """
    return _shape(draft_tree, wanted.k, MlpSpeculatorConfig.read(folder, target).stages)


def _shape(draft_tree: str, k: int, stages: int) -> DraftShape:
    shape = parse_draft_tree(draft_tree, k=min(k, stages))
    if shape.depth > stages:
        raise ConfigurationError(
            f"draft_tree: expected at most {stages} levels, one for each stage of this speculator, got {shape.depth}; "
            "use a flatter tree"
        )
    return shape


class MlpSpeculatorHead(DraftHead):
    """All stages. ``weights`` are in the number format of ``options``."""

    reads = FeatureSpec()
    ones: Tensor

    def __init__(
        self, config: MlpSpeculatorConfig, weights: Mapping[str, Tensor], *, kernels: Kernels, options: DecoderOptions
    ) -> None:
        super().__init__(kernels, options)
        self.config = config
        for name, x in weights.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(x.contiguous(), requires_grad=False))
        self.register_buffer("ones", torch.ones(config.hidden_size))
        kept = 0.5 ** (0.5 / config.stages)  # the share of the state, whose square is halved over all stages
        self._added = math.sqrt((1 - kept**2) * config.inner_size / 2) / kept

    def real_rows(self, sampling: SamplingTensors, window: int) -> Tensor | None:
        return self.seated_rows(sampling, window)

    def step(self, k: int, bucket: int, kind: SamplingKind) -> nn.Module:
        return MlpSpeculatorStep(self, DraftShape.chain(k), kind=kind)

    def first(self, state: Tensor) -> Tensor:
        """The target's state [B, 1, H] -> what the first stage reads."""
        return self.kernels.norm(state, self.ones, eps=_EPS) / math.sqrt(2) if self.config.scale_input else state

    def stage(self, index: int, state: Tensor, token: Tensor, *, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """state [B, 1, H or I], token [B, 1] int32 -> the next state [B, 1, I], and its logits [B, 1, V]."""
        added = self.kernels.embed(self._of("emb", index), token) * self._added
        x = self.kernels.linear(state, self._of("proj", index), real) + added
        x = self.kernels.norm(x, self._of("ln", index), eps=_EPS) + self._of("ln", index, "bias")
        state = self.kernels.activate(x.contiguous(), "gelu", gated=False)
        return state, self.kernels.linear(state, self._of("head", index), real)

    def _of(self, part: str, index: int, kind: str = "weight") -> nn.Parameter:
        return self.get_parameter(f"{self.config.stage(part, index)}.{kind}".replace(".", "_"))


class MlpSpeculatorStep(nn.Module):
    """Draft a chain, or a static tree, every level by its stage. ``kind``: of sampling, of the rounds it is for."""

    def __init__(self, head: MlpSpeculatorHead, shape: DraftShape, *, kind: SamplingKind = "full") -> None:
        super().__init__()
        self.head, self._k, self._kind = head, shape.depth, kind
        self.levels = None if shape.is_chain or not shape.parents else LevelTree(shape.parents)

    def forward(
        self, tokens: Tensor, count: Tensor, first_row: Tensor, params: Tensor, seeds: Tensor, features: Tensor
    ) -> tuple[Tensor]:
        """The fields of a Commit [B, W], params [B, 4], seeds [B, 4], features [B, W, H] -> drafts [B, N] int32."""
        head, sampling, stages = self.head, SamplingTensors(params, seeds, self._kind), iter(range(self._k))

        def after(token: Tensor, both: Tensor) -> Tensor:
            """Tokens [B, n], states [B, n, >= H or I] before them -> the next states and their logits, joined."""
            index, real = next(stages), head.real_rows(sampling, token.shape[1])
            width = head.config.inner_size if index else head.config.hidden_size
            return torch.cat(head.stage(index, both[..., :width].contiguous(), token, real=real), -1)

        position = (first_row + count).unsqueeze(1)
        state = head.first(at_index(features, count - 1).contiguous())
        last = at_index(tokens, count - 1).clamp(min=0, max=head.config.vocab_size - 1)
        both = after(last, state)

        def logits(both: Tensor) -> Tensor:
            return both[..., head.config.inner_size :].contiguous()

        if self.levels is not None:
            rank: Rank = lambda both, *at, count: head.kernels.rank_tokens(logits(both), *at, count=count)  # noqa: E731
            extend: Extend = lambda nodes, states, _: after(nodes, states)  # noqa: E731
            return (self.levels.grown(rank, both, extend, position=position, sampling=sampling),)
        drafts: list[Tensor] = []
        for index in range(self._k):
            both = after(drafts[-1], both) if index else both
            drafts.append(head.kernels.sample_tokens(logits(both), position + index, sampling))
        return (torch.cat(drafts, 1),)


class MlpSpeculatorDrafter(HeadDrafter):
    """Drafts chains of up to as many tokens as the speculator has stages, or static trees of as many levels."""

    head: MlpSpeculatorHead

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], target: CompiledDecoder, k: int | None = None, *, draft_tree: str = "chain"
    ) -> MlpSpeculatorDrafter:
        """Load a speculator for a target.

        path        folder with its config.json and weights, or an id of the Hugging Face hub
        k           drafted tokens; None, or more than there are stages: one for each stage
        draft_tree  "chain", or "tree:PARENTS" with the parent of each node, -1 for the root

        Raises:
            ConfigurationError: the tree is deeper than there are stages.
            CheckpointError: the folder cannot be used.
            PairingError: it is for another target.
        """
        folder, dtype = checkpoint_path(path), target.options.dtype
        config, found = load(folder, target.config)
        weights = as_dtype(folder, found, dtype)
        head = MlpSpeculatorHead(config, weights, kernels=target.backend.kernels, options=target.options)
        return cls(head, target, _shape(draft_tree, config.stages if k is None else k, config.stages))

    def step(self, bucket: int, kind: SamplingKind) -> nn.Module:
        return MlpSpeculatorStep(self.head, self.draft_shape, kind=kind)

    def cache_key(self) -> dict[str, object]:
        return {"mlp speculator": asdict(self.head.config), "dtype": str(self.head.options.dtype)}
