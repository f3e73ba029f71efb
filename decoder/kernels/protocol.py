"""The interface that a decoder requires of a backend's kernels, and the values of its calls.

Kernels are the operations that determine a decoder's speed. Some compute the whole attention and MLP of a layer
(`LayerKernels`). A backend that compiles takes norms, rotations and activations from `paceline.decoder.kernels.plain`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.core import noise, tree
from paceline.core.types import SamplingTensors
from paceline.decoder.kernels.plain import NormKind
from paceline.decoder.parallel.vocab_part import VocabPart
from paceline.decoder.weights.quantize import MatrixLike


@dataclass(frozen=True, slots=True)
class Tree:
    """A window whose rows are nodes of a tree: each attends to the committed rows and to its own ancestors.

    parents  [b, T] int32, the window row of each row's parent; -1 for the root, row 0
    seen     [b, T, T] float32, 1 where row j is row i or an ancestor of it
    """

    parents: Tensor
    seen: Tensor

    @classmethod
    def of(cls, parents: Tensor) -> Tree:
        return cls(parents, tree.ancestor_mask(parents))

    @property
    def depth(self) -> Tensor:
        """Distance of each row from the root. [b, T] int32"""
        return self.seen.sum(-1).to(torch.int32) - 1


@dataclass(frozen=True, slots=True)
class CachePosition:
    """Position in the cache of the rows of a call.

    row    [b] int32, cache row of the first token of each batch row
    count  [b] int32, number of real tokens of each batch row; the rest is padding
    slots  [b] int32, cache slot of each batch row
    bucket number of cache rows that the graph reads
    padded whether ``count`` may be smaller than the window: then padding need not be computed
    tree   set where the window is a tree and not a run of consecutive tokens
    in_order  batch row b is slot b: the batch is the first slots, whose part of a cache is read in place
    both_ways  real tokens attend to all real tokens of the window, also to later ones
    """

    row: Tensor
    count: Tensor
    slots: Tensor
    bucket: int
    padded: bool = False
    tree: Tree | None = None
    in_order: bool = False
    both_ways: bool = False

    def positions(self, window: int) -> Tensor:
        """Sequence position of every token of a window. [b, T] int32"""
        steps = torch.arange(window, dtype=torch.int32, device=self.row.device)
        return self.row.unsqueeze(1) + (steps if self.tree is None else self.tree.depth)

    @property
    def real(self) -> Tensor | None:
        """``count`` if there may be padding, else None."""
        return self.count if self.padded else None


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Variations of a layer's attention.

    window  number of positions a token sees, its own included (sliding window); 0: all
    chunk   a token sees positions of its own chunk of that many alone, 0 for all (Llama 4); not with a window
    cap     scores become cap * tanh(score / cap), Gemma 2's soft cap; 0: no cap
    sinks   [H] float32, a score of each head beside those of keys, whose weight goes nowhere (gpt-oss); None: there is
            none
    slopes  [H] float32, ALiBi (Press et al., arXiv 2108.12409): a head's slope times (key position - query position) is
            added to each score; None: no term is added
    """

    window: int = 0
    cap: float = 0.0
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    chunk: int = 0


PLAIN_ATTENTION = AttentionRule()


@runtime_checkable
class Kernels(Protocol):
    """Letters: batch rows b, tokens T of a batch row, heads H, key-value heads G, head width D, cache rows R.

    Activations are float32; a matmul may round them to the type of its weights. Weights have the type that ``amp``
    names, or a quantised type; caches have the type of ``amp`` or 8-bit rows (`paceline.decoder.kernels.cache_rows`),
    whose R x D numbers are R x (D + 4) elements. ``batch_invariant``: a row's bits do not depend on the number of rows
    of its window. ``sampling_kinds``: a graph is made for every sampling mode, and relies on `SamplingTensors.kind`.
    Otherwise one graph serves all modes: its kernels read the values of every row, and ignore the mode.
    ``skips_padding``: padding rows cost nothing and are not written. Slots without a request are then padding.
    """

    batch_invariant: bool
    sampling_kinds: bool
    skips_padding: bool

    @property
    def layers(self) -> LayerKernels | None:
        """Kernels for the whole attention and MLP of a layer, if any. A sharded model cannot use them."""

    @property
    def mixture(self) -> MixtureKernels | None:
        """Kernels for a mixture of experts (MoE), if they can read the active experts of a row. A graph of fixed shape
        cannot.
        """

    def linear(self, x: Tensor, weight: MatrixLike, count: Tensor | None = None) -> Tensor:
        """x [b, T, in] @ weight [out, in].T -> [b, T, out]

        Rows from ``count`` [b] on may hold anything finite. A count of -1 - n means n rows, and the rest of the result
        may be anything, even NaN.
        """

    def attend(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        place: CachePosition,
        *,
        rule: AttentionRule = PLAIN_ATTENTION,
    ) -> Tensor:
        """Write keys and values to their rows, then attend to all rows up to the token's own.

        In a tree, attend to all rows before the window and to the token's own ancestors; if ``place.both_ways``, to all
        rows before the end of the window's real ones. A sliding window begins at the same row in each case. Scores are
        divided by the root of D; a family that scales otherwise scales its queries.
        q [b, T, H, D], k and v [b, T, G, D], cache twice [slots, G, R, D] (changed in place) -> [b, T, H * D]
        """

    def norm(
        self, x: Tensor, weight: Tensor, *, eps: float, bias: Tensor | None = None, kind: NormKind = "rms"
    ) -> Tensor:
        """Normalise the last dimension, x [b, ..., K] float32, weight and bias [K].

        ``kind``: "rms" (Zhang and Sennrich, arXiv 1910.07467), "rms plus one" (weights are stored less 1), or "layer".
        """

    def rotate(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate x [b, T, n, D] by cos and sin [b, T, 1, R]: the first R of D dimensions, in pairs R / 2 apart."""

    def activate(self, x: Tensor, activation: str, *, gated: bool) -> Tensor:
        """Apply one of `ACTIVATIONS` to x [b, T, F], or `gate_with` to the halves of x [b, T, 2 F] -> [b, T, F]."""

    def embed(self, table: MatrixLike, ids: Tensor) -> Tensor:
        """Look up rows of a table [n, K], float32: ids [b, T] int32 -> [b, T, K]"""

    def compact_path(self, cache: tuple[Tensor, Tensor], row: Tensor, path: Tensor, *, slots: Tensor) -> None:
        """Move the rows of an accepted path to consecutive rows, in place.

        cache twice [slots, G, R, D]; row [b] int32, of the window's root; path [b, D] int32, rows of the window in
        ascending order, PAD after the last
        """

    def sample_tokens(
        self,
        logits: Tensor,
        positions: Tensor,
        sampling: SamplingTensors,
        *,
        stream: int = noise.TARGET,
        part: VocabPart | None = None,
    ) -> Tensor:
        """Sample a token per position, as `paceline.core.probs.sample_tokens`; any id in a slot without a request, or
        where the position is PAD.

        ``part``: the ids of the logits (None: all), passed only to kernels with sampling modes. Kernels that skip
        padding do not read the logits of such rows, in this method and the next two.
        """

    def rank_tokens(
        self,
        logits: Tensor,
        positions: Tensor,
        sampling: SamplingTensors,
        *,
        count: int,
        part: VocabPart | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rank the best ``count`` tokens, as `paceline.core.probs.rank_tokens`: one call for all children of a draft
        tree's level.

        ``part``: the ids of the logits; a sharded one is passed only to kernels with sampling modes.
        """

    def probabilities(self, logits: Tensor, sampling: SamplingTensors) -> Tensor:
        """Return the distribution of `sample_tokens`, as `paceline.core.probs.probabilities` up to float32's
        rounding.
        """

    def cuts(self, sampling: SamplingTensors) -> bool:
        """Return whether top-k, top-p or min-p may be on in any row. In a graph, where values are unknown: True."""


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Attention weights of a layer: norm [H], q, k and v in one matrix [(heads + 2 G) D, H], output [H, heads D]."""

    norm: Tensor
    qkv: MatrixLike
    qkv_bias: Tensor | None
    out: MatrixLike
    out_bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """MLP weights of a layer: norm [H], gate and up in one matrix [2 F, H], down [H, F]."""

    norm: Tensor
    gate_up: MatrixLike
    gate_up_bias: Tensor | None
    down: MatrixLike
    down_bias: Tensor | None
    eps: float


class LayerKernels(Protocol):
    """Attention and MLP of a layer, each with its norm and the addition to the residual stream."""

    def attention(
        self,
        hidden: Tensor,
        weights: AttentionWeights,
        place: CachePosition,
        *,
        cache: tuple[Tensor, Tensor],
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        """hidden [b, T, H], cos and sin [b, T, 1, D] -> hidden [b, T, H]; rows from ``count`` on are finite."""

    def mlp(self, hidden: Tensor, weights: MlpWeights, count: Tensor | None = None) -> Tensor:
        """Compute the MLP: hidden [b, T, H] -> [b, T, H]; rows from ``count`` [b] on may hold anything finite."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of E experts, or a rank's shard of each: down(activation(gate(x)) * up(x)).

    gate_up       gate and up of every expert, concatenated by rows [E * 2 F, H]
    down          down matrices of all experts, concatenated by rows [E * H, F]
    activation    one of `paceline.decoder.kernels.plain.ACTIVATIONS`
    gate_up_bias  float32 [E * 2 F], or None
    """

    gate_up: MatrixLike
    down: MatrixLike
    activation: str
    gate_up_bias: Tensor | None = None


class MixtureKernels(Protocol):
    """A mixture of experts (MoE) that computes active experts only."""

    def experts(self, x: Tensor, shares: Tensor, weights: ExpertWeights, *, count: Tensor | None = None) -> Tensor:
        """x [b, T, H], shares [b, T, E] -> [b, T, H]: the sum of share times expert, in the order of expert numbers.

        An expert whose share of every row is 0 is not read. Rows from ``count`` on are finite and activate no expert.
        """
