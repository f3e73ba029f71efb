"""Tensor parallelism: shards of a model's tensors and heads per rank. Pure arithmetic on a ModelConfig.

A family declares how each of its tensors is sharded (`TensorSpec`); the user chooses the layout of the K/V heads of
grouped-query attention (`GQA`). If heads or columns cannot be divided evenly, ranks are padded with zeros, which do not
change sums. Files are read by `paceline.decoder.weights.checkpoint`, collectives are in
`paceline.decoder.parallel.collectives`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigurationError

if TYPE_CHECKING:
    from paceline.decoder.models.config import ModelConfig


class Split(Enum):
    """Sharding of a tensor over the ranks.

    Shares are equal; if the number is not divisible, the last ones are padded with zeros.

    WHOLE          replicated: norms, and biases added after a sum over the ranks
    ROWS           shares of its rows: gate and up matmuls, and their biases
    COLUMNS        shares of its columns: matmuls whose results are summed over the ranks (down)
    QUERY_ROWS     rows by query heads: query matmuls, and their biases
    QUERY_COLUMNS  columns by query heads: the output matmul of attention
    KEY_ROWS       rows by K/V heads, see `GQA`: key and value matmuls, and their biases
    VOCABULARY     shares of its rows: embedding and output head
    """

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"
    QUERY_ROWS = "query rows"
    QUERY_COLUMNS = "query columns"
    KEY_ROWS = "key rows"
    VOCABULARY = "vocabulary"

    @property
    def summed(self) -> bool:
        """Whether the columns are sharded, so that results are summed over the ranks."""
        return self in (Split.COLUMNS, Split.QUERY_COLUMNS)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a checkpoint.

    shape   linear weights are [out, in], transposed ones [in, out]
    split   how it is sharded over ranks
    copies  names under which a checkpoint may hold the same tensor once more; a copy is compared and dropped
    blocks  several matrices concatenated by rows: the rows of each, and how they are sharded; ``split`` is then by rows
    transposed  a linear weight stored as [in, out]; ``split`` and ``blocks`` refer to it as [out, in]
    exact   loaded as float32 whatever the decoder computes in
    key_heads  K/V heads of the tensor's layer; 0: as the model has
    """

    shape: tuple[int, ...]
    split: Split = Split.WHOLE
    copies: tuple[str, ...] = ()
    blocks: tuple[tuple[int, Split], ...] = ()
    transposed: bool = False
    exact: bool = False
    key_heads: int = 0

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix of a layer."""
        return len(self.shape) == 2 and self.split is not Split.VOCABULARY

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix of a layer or a table of the vocabulary, which quantisation makes smaller."""
        return len(self.shape) == 2 and self.split is not Split.WHOLE


class GQA(Enum):
    """Placement of K/V heads, by the names of transformers-neuronx.

    SHARD_OVER_HEADS  whole heads, on the ranks of their query heads; their number must be divisible by the degree
    REPLICATED_HEADS  each rank has a copy of the K/V heads of its query heads
    ALL_GATHER_HEADS  the rows of the K/V matrices are sharded, and all ranks' keys and values are gathered: no weight
                      is read twice, for one more collective per layer; caches as in REPLICATED_HEADS
    """

    SHARD_OVER_HEADS = "shard-over-heads"
    REPLICATED_HEADS = "replicated-heads"
    ALL_GATHER_HEADS = "all-gather-heads"

    @classmethod
    def of(cls, name: GQA | str) -> GQA:
        """Return the value of that name; raise ConfigurationError if it does not exist."""
        try:
            return cls(name)
        except ValueError as error:
            names = ", ".join(repr(one.value) for one in cls)
            raise ConfigurationError(
                f"group_query_attention: expected one of {names}, got {name!r}; use one of them"
            ) from error


@dataclass(frozen=True, slots=True)
class Layout:
    """Sharding of a model: the number of ranks, and the placement of K/V heads."""

    degree: int = 1
    gqa: GQA = GQA.SHARD_OVER_HEADS


WHOLE = Layout()


def layout(config: ModelConfig, degree: int, gqa: GQA | str | None = None) -> Layout:
    """Return a checked layout. ``gqa`` None: whole heads if they can be divided, copies otherwise."""
    heads = config.num_kv_heads
    if gqa is None:
        return Layout(degree, GQA.REPLICATED_HEADS if heads % degree else GQA.SHARD_OVER_HEADS)
    gqa = GQA.of(gqa)
    if gqa is GQA.SHARD_OVER_HEADS and heads % degree:
        raise ConfigurationError(
            f"group_query_attention: expected K/V heads divisible by tp_degree={degree} for 'shard-over-heads', got "
            f"{heads}; use 'replicated-heads' or 'all-gather-heads'"
        )
    if gqa is GQA.ALL_GATHER_HEADS and heads * config.head_dim % degree:
        raise ConfigurationError(
            f"group_query_attention: expected K/V heads that {degree} ranks can share evenly for "
            f"'all-gather-heads', got {heads} of {config.head_dim} numbers; use 'replicated-heads'"
        )
    return Layout(degree, gqa)


def padding(config: ModelConfig, degree: int) -> dict[str, tuple[int, int]]:
    """Return the padding over ``degree`` ranks: per quantity, the model's number and the computed number."""
    shard = Shard(config, Layout(degree, GQA.REPLICATED_HEADS))
    computed = {
        "attention heads": (config.num_heads, degree * shard.heads),
        "columns of the MLP": (config.intermediate_size, degree * _share(config.intermediate_size, degree)),
        "ids of the vocabulary": (config.vocab_size, degree * len(shard.ids)),
    }
    return {what: (has, computes) for what, (has, computes) in computed.items() if has != computes}


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Some rows or columns of a tensor.

    dim     the sharded dimension; the others are whole
    ranges  from (included) to (not included), in the order they are joined; a range may come twice
    sizes   final size of each range: zeros are added after it
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Final size of that dimension."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard of a model on one rank."""

    config: ModelConfig
    layout: Layout = WHOLE
    rank: int = 0

    @property
    def degree(self) -> int:
        return self.layout.degree

    @property
    def heads(self) -> int:
        """Number of query heads that this rank computes: the same on every rank, some of them may be zeros."""
        config = self.config
        if config.num_heads % self.degree == 0:
            return config.num_heads // self.degree
        return self._groups * self._group_size if self._ranks_per_group == 1 else self._group_part

    @property
    def queries(self) -> range:
        """The query heads of the model that this rank computes, at most `heads`; zeros follow."""
        config, end = self.config, self.config.num_heads
        if config.num_heads % self.degree == 0 or self._ranks_per_group == 1:
            return range(min(self.rank * self.heads, end), min((self.rank + 1) * self.heads, end))
        group, part = divmod(self.rank, self._ranks_per_group)
        first = min(group * self._group_size, end)
        begin, stop = (min(at * self.heads, self._group_size) for at in (part, part + 1))
        return range(min(first + begin, end), min(first + stop, end))

    @property
    def key_heads(self) -> tuple[int, ...]:
        """The K/V heads in this rank's cache, each for equally many query heads; a padded rank has unused copies."""
        config, last = self.config, self.config.num_kv_heads - 1
        if config.num_heads % self.degree:
            first = self.rank * self._groups // self._ranks_per_group
            return tuple(min(first + i, last) for i in range(self._groups))
        needed = [query // self._group_size for query in self.queries]
        # Either a rank's query heads fill whole K/V heads, or all belong to one; else each gets a separate copy.
        even = self.heads % self._group_size == 0 or self._group_size % self.heads == 0
        return tuple(dict.fromkeys(needed)) if even else tuple(needed)

    # If query heads cannot be divided evenly, no rank gets parts of two groups (a K/V head and its queries): a rank has
    # whole groups, or a group has whole ranks. Some ranks may be unused.

    @property
    def _group_size(self) -> int:
        """Query heads per K/V head."""
        return self.config.num_heads // self.config.num_kv_heads

    @property
    def _groups(self) -> int:
        """K/V heads per rank."""
        return _share(self.config.num_kv_heads, self.degree)

    @property
    def _ranks_per_group(self) -> int:
        return max(1, min(self.degree // self.config.num_kv_heads, self._group_size))

    @property
    def _group_part(self) -> int:
        """Query heads of a rank that shares its K/V head with other ranks."""
        return _share(self._group_size, self._ranks_per_group)

    @property
    def key_part(self) -> int:
        """Rows of the key matrix (and of the value matrix) that this rank multiplies."""
        if self.layout.gqa is GQA.ALL_GATHER_HEADS:
            return self.config.num_kv_heads * self.config.head_dim // self.degree
        return len(self.key_heads) * self.config.head_dim

    @property
    def gathers(self) -> bool:
        """Whether keys and values are gathered from all ranks."""
        return self.degree > 1 and self.layout.gqa is GQA.ALL_GATHER_HEADS

    @property
    def ids(self) -> range:
        """Token ids of this rank's part of the vocabulary; those of the last rank may exceed its size."""
        count = _share(self.config.vocab_size, self.degree)
        return range(self.rank * count, (self.rank + 1) * count)

    def slice_of(self, spec: TensorSpec) -> TensorSlice | None:
        """Return this rank's part of a tensor; None = all of it."""
        if self.degree == 1 or spec.split is Split.WHOLE:
            return None
        if spec.key_heads not in (0, self.config.num_kv_heads):
            return replace(self, config=replace(self.config, num_kv_heads=spec.key_heads)).slice_of(spec)
        if spec.blocks:
            return self._blocks(spec)
        dim = int(spec.split.summed is not spec.transposed)
        if spec.split is Split.KEY_ROWS:
            if self.gathers:
                return _even(dim, spec.shape[dim], self.degree, rank=self.rank)
            width = spec.shape[dim] // self.config.num_kv_heads
            ranges = tuple((h * width, (h + 1) * width) for h in self.key_heads)
            return TensorSlice(dim, ranges, (width,) * len(ranges))
        if spec.split in (Split.QUERY_ROWS, Split.QUERY_COLUMNS):
            width = spec.shape[dim] // self.config.num_heads
            span = (self.queries.start * width, self.queries.stop * width)
            return TensorSlice(dim, (span,), (self.heads * width,))
        return _even(dim, spec.shape[dim], self.degree, rank=self.rank)

    def _blocks(self, spec: TensorSpec) -> TensorSlice:
        ranges: list[tuple[int, int]] = []
        sizes: list[int] = []
        begin = 0
        for rows, split in spec.blocks:
            own = self.slice_of(TensorSpec((rows,), split))
            assert own is not None, "a replicated block must be a separate tensor"
            ranges += [(begin + a, begin + b) for a, b in own.ranges]
            sizes += own.sizes
            begin += rows
        return TensorSlice(int(spec.transposed and len(spec.shape) > 1), tuple(ranges), tuple(sizes))

    def numbers_of(self, spec: TensorSpec) -> int:
        """Return the number of elements of a tensor on this rank."""
        cut = self.slice_of(spec)
        return prod(spec.shape if cut is None else (*spec.shape[: cut.dim], cut.size, *spec.shape[cut.dim + 1 :]))

    def of_layer(self, index: int) -> Shard:
        return replace(self, config=self.config.of_layer(index))

    def cache_numbers(self, rows: int, *, more: int = 0) -> int:
        """Return how many numbers a rank's keys and values of ``rows`` tokens have, with ``more`` than a head's width
        for each.
        """
        layers = map(self.of_layer, self.config.cached_layers)
        return 2 * rows * sum(len(one.key_heads) * (one.config.head_dim + more) for one in layers)


def _even(dim: int, size: int, degree: int, *, rank: int) -> TensorSlice:
    part = _share(size, degree)
    return TensorSlice(dim, ((min(rank * part, size), min((rank + 1) * part, size)),), (part,))


def _share(amount: int, degree: int) -> int:
    return -(-amount // degree)
