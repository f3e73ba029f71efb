"""Tensor parallelism: which part of a model's tensors and heads each rank has. Pure arithmetic on a ModelConfig.

A family says how each of its tensors is divided (`TensorSpec`); how the K/V heads of grouped-query attention are laid
out is the user's choice (`GQA`). Not here: reading files (`paceline.decoder.weights.checkpoint`), talking between ranks
(`paceline.decoder.parallel.collectives`), and which degrees a chip takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

from paceline.core.errors import ConfigurationError
from paceline.decoder.models.config import ModelConfig


class Split(Enum):
    """How a tensor is divided over the ranks.

    WHOLE       every rank has all of it: norms, and biases added after a sum over the ranks
    ROWS        equal shares of its rows: query, gate and up products, and their biases
    COLUMNS     equal shares of its columns: products whose results are summed over the ranks (output, down)
    KEY_ROWS    rows by K/V heads, as `GQA` says: key and value products, and their biases
    VOCABULARY  equal shares of its rows, the last share filled up with zeros: embedding and output head
    """

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"
    KEY_ROWS = "key rows"
    VOCABULARY = "vocabulary"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a checkpoint.

    shape   linear weights are [out, in], transposed ones [in, out]
    split   how it is divided over ranks
    copies  names under which a checkpoint may hold the same tensor once more; a copy is compared and dropped
    blocks  several matrices below each other in one: the rows of each, and how it is divided; ``split`` then says ROWS
    transposed  a linear weight stored as [in, out]; ``split`` and ``blocks`` speak of it as [out, in]
    """

    shape: tuple[int, ...]
    split: Split = Split.WHOLE
    copies: tuple[str, ...] = ()
    blocks: tuple[tuple[int, Split], ...] = ()
    transposed: bool = False

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix of a layer."""
        return len(self.shape) == 2 and self.split is not Split.VOCABULARY

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix of a layer or a table of the vocabulary: what quantisation makes smaller."""
        return len(self.shape) == 2 and self.split is not Split.WHOLE


class GQA(Enum):
    """Where K/V heads live, by the names of transformers-neuronx.

    SHARD_OVER_HEADS  whole heads, on the ranks of their query heads; their number must be divisible by the degree
    REPLICATED_HEADS  each rank has a copy of the heads its query heads need
    ALL_GATHER_HEADS  the rows of the K/V matrices are divided, and every rank's part of keys and values is gathered:
                      no weight is read twice, for one collective more in every layer; caches as with copies
    SHARD_OVER_BATCH  caches divided by slots; refused here
    """

    SHARD_OVER_HEADS = "shard-over-heads"
    REPLICATED_HEADS = "replicated-heads"
    ALL_GATHER_HEADS = "all-gather-heads"
    SHARD_OVER_BATCH = "shard-over-batch"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is divided: over how many ranks, and its K/V heads how."""

    degree: int = 1
    gqa: GQA = GQA.SHARD_OVER_HEADS


WHOLE = Layout()


def why_not_divisible(config: ModelConfig, degree: int) -> str:
    """Why this model cannot be divided over so many ranks; nothing if it can. The planner's rule too."""
    for number, what in ((config.num_heads, "attention heads"), (config.intermediate_size, "columns of the MLP")):
        if number % degree:
            return f"{number} {what} are not divisible by tp_degree={degree}"
    return ""


def layout(config: ModelConfig, degree: int, gqa: GQA | str | None = None) -> Layout:
    """A checked layout. ``gqa`` None: whole heads if they can be divided, copies otherwise.

    Raises:
        ConfigurationError: the model cannot be divided like that.
    """
    if not isinstance(degree, int) or degree < 1:
        raise ConfigurationError(f"tp_degree must be a number of ranks, 1 or more, not {degree!r}")
    if reason := why_not_divisible(config, degree):
        legal = [d for d in range(1, config.num_heads + 1) if not why_not_divisible(config, d)]
        raise ConfigurationError(f"{reason}; use one of {', '.join(map(str, legal))}")
    heads = config.num_kv_heads
    if gqa is None:
        return Layout(degree, GQA.REPLICATED_HEADS if heads % degree else GQA.SHARD_OVER_HEADS)
    try:
        gqa = GQA(gqa)
    except ValueError as error:
        names = ", ".join(repr(one.value) for one in GQA)
        raise ConfigurationError(f"group_query_attention={gqa!r} is unknown; use one of {names}") from error
    if gqa is GQA.SHARD_OVER_BATCH:
        raise ConfigurationError(
            "group_query_attention='shard-over-batch' is not offered: a prompt is read into one slot at a time, and "
            "all ranks but the slot's own would idle; use 'replicated-heads', or 'all-gather-heads' to read less"
        )
    if gqa is GQA.SHARD_OVER_HEADS and heads % degree:
        raise ConfigurationError(
            f"{heads} K/V heads are not divisible by tp_degree={degree}, as 'shard-over-heads' needs; use "
            "'replicated-heads' or 'all-gather-heads'"
        )
    if gqa is GQA.ALL_GATHER_HEADS and heads * config.head_dim % degree:
        raise ConfigurationError(
            f"{heads} K/V heads of {config.head_dim} numbers have no even part for each of {degree} ranks, as "
            "'all-gather-heads' needs; use 'replicated-heads'"
        )
    return Layout(degree, gqa)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Some rows or columns of a tensor.

    dim     the divided dimension; the others are whole
    ranges  from (included) to (not included), in the order they are joined; a range may come twice
    size    of that dimension in the end: zeros are added behind
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    size: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank has of a model."""

    config: ModelConfig
    layout: Layout = WHOLE
    rank: int = 0

    @property
    def degree(self) -> int:
        return self.layout.degree

    @property
    def heads(self) -> int:
        """How many query heads this rank computes."""
        return self.config.num_heads // self.degree

    @property
    def key_heads(self) -> tuple[int, ...]:
        """The K/V heads in this rank's cache, in order. Each serves equally many of its query heads."""
        share = self.config.num_heads // self.config.num_kv_heads
        first = self.rank * self.heads
        needed = [query // share for query in range(first, first + self.heads)]
        # Either a rank's query heads fill whole K/V heads, or all belong to one; else each gets a copy of its own.
        even = self.heads % share == 0 or share % self.heads == 0
        return tuple(dict.fromkeys(needed)) if even else tuple(needed)

    @property
    def key_part(self) -> int:
        """Rows of the key matrix (and of the value matrix) whose products this rank computes."""
        if self.layout.gqa is GQA.ALL_GATHER_HEADS:
            return self.config.num_kv_heads * self.config.head_dim // self.degree
        return len(self.key_heads) * self.config.head_dim

    @property
    def gathers(self) -> bool:
        """Whether keys and values are put together from all ranks' products."""
        return self.degree > 1 and self.layout.gqa is GQA.ALL_GATHER_HEADS

    @property
    def ids(self) -> range:
        """Token ids of this rank's part of the vocabulary; those of the last rank may run past its end."""
        count = -(-self.config.vocab_size // self.degree)
        return range(self.rank * count, (self.rank + 1) * count)

    def slice_of(self, spec: TensorSpec) -> TensorSlice | None:
        """What this rank has of a tensor; None = all of it."""
        if self.degree == 1 or spec.split is Split.WHOLE:
            return None
        if spec.blocks:
            return self._blocks(spec)
        if spec.split is Split.VOCABULARY:
            end = spec.shape[0]
            return TensorSlice(0, ((min(self.ids.start, end), min(self.ids.stop, end)),), len(self.ids))
        if spec.split is Split.KEY_ROWS:
            if self.gathers:
                return _even(0, self.key_part, self.rank)
            width = self.config.head_dim
            return TensorSlice(0, tuple((h * width, (h + 1) * width) for h in self.key_heads), self.key_part)
        dim = int((spec.split is Split.COLUMNS) is not spec.transposed)
        return _even(dim, spec.shape[dim] // self.degree, self.rank)

    def _blocks(self, spec: TensorSpec) -> TensorSlice:
        """This rank's rows of each of the matrices, one after the other."""
        ranges: list[tuple[int, int]] = []
        begin = size = 0
        for rows, split in spec.blocks:
            own = self.slice_of(TensorSpec((rows,), split))
            assert own is not None, "what is whole on every rank is a tensor of its own"
            ranges += [(begin + a, begin + b) for a, b in own.ranges]
            begin, size = begin + rows, size + own.size
        return TensorSlice(int(spec.transposed and len(spec.shape) > 1), tuple(ranges), size)

    def numbers_of(self, spec: TensorSpec) -> int:
        """How many numbers this rank has of a tensor."""
        cut = self.slice_of(spec)
        return prod(spec.shape if cut is None else (*spec.shape[: cut.dim], cut.size, *spec.shape[cut.dim + 1 :]))


def _even(dim: int, size: int, rank: int) -> TensorSlice:
    return TensorSlice(dim, ((rank * size, (rank + 1) * size),), size)
