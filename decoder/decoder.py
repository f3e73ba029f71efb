"""A model with its cache on a backend: target and drafters build their graphs from it.

Stores rows, never a length: rolling back is not advancing. All graphs share one set of weights and one cache. Requests
take the lowest free slots, and a graph for R of them works on the first R slots of the cache.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from paceline.core.errors import ArtefactError, ConfigurationError, DecoderBusyError
from paceline.core.types import PAD, FeatureSpec, SamplingKind, SamplingTensors
from paceline.decoder.backends.base import Backend, Graph, Step
from paceline.decoder.backends.registry import BACKENDS
from paceline.decoder.compile import cache
from paceline.decoder.graph_key import GraphEvent, GraphKey, log_compilation
from paceline.decoder.kernels.cache_rows import row_elements
from paceline.decoder.kernels.protocol import CachePosition, Kernels, Tree
from paceline.decoder.models import registry
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.layers import Weights
from paceline.decoder.options import DecoderOptions
from paceline.decoder.parallel.collectives import Collectives, SingleRank
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.parallel.vocab_parallel import SharedHead, choose, whole
from paceline.decoder.parallel.vocab_part import VocabPart
from paceline.decoder.prefix_cache import PrefixCache
from paceline.decoder.weights.checkpoint import load_weights
from paceline.decoder.weights.quantize import PackedMatrix

StepMaker = Callable[["ModelWithCache", int], nn.Module]


class ModelWithCache(nn.Module):
    """The model and its cache as one module, so that a traced step sees both as state."""

    def __init__(
        self,
        config: ModelConfig,
        options: DecoderOptions,
        weights: Weights,
        *,
        kernels: Kernels,
        rank: int = 0,
        group: Collectives | None = None,
    ) -> None:
        super().__init__()
        self.config, self.kernels, self.options = config, kernels, options
        self.shard = Shard(config, options.layout, rank)
        self.group: Collectives = group or SingleRank()
        assert self.group.degree == self.shard.degree, "a divided model needs its group of ranks"
        family = registry.family(config.model_type)
        self.model = family.build(self.shard, weights, kernels, positions=options.n_positions, group=self.group)
        for index in config.cached_layers:
            own = self.shard.of_layer(index)
            width = row_elements(own.config.head_dim, options.cache_dtype)
            shape = (options.batch_size, len(own.key_heads), options.rows, width)
            for side in ("keys", "values"):
                self.register_buffer(f"{side}_{index}", torch.zeros(shape, dtype=options.cache_dtype))
        self.register_buffer("slots", torch.arange(options.batch_size, dtype=torch.int32))
        self.skips_idle = kernels.skips_padding and options.batch_size > 1 and self.group.degree == 1

    @property
    def caches(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of layers that have their own, [slots, G, rows, D] of this rank; D + 4 in 8 bits."""
        layers = self.config.cached_layers
        return [(self.get_buffer(f"keys_{i}"), self.get_buffer(f"values_{i}")) for i in layers]

    def forward(
        self, tokens: Tensor, place: CachePosition, reads: FeatureSpec | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """tokens [b, T] int32 -> hidden [b, T, H] and features [b, T, F]; keys and values go to their cache rows."""
        hidden, features = self.model(tokens, place, self.caches, reads=reads)
        return hidden, features

    def window(
        self,
        tokens: Tensor,
        row: Tensor,
        bucket: int,
        *,
        tree: Tree | None = None,
        reads: FeatureSpec | None = None,
        sampling: SamplingTensors | None = None,
        used: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states and features of a window of real tokens in the first slots. tokens [B, T], row [B].

        A row past the last position is clamped to it: results of such a slot are not used. ``sampling`` marks the slots
        that hold a request, and ``used`` [B] how many of their rows are needed (None: all); results of others are any
        finite numbers.
        """
        row = row.clamp(max=self.options.n_positions - 1)
        count = None if sampling is None else self.real_rows(sampling, tokens.shape[1] if used is None else used)
        padded = count is not None
        count = torch.full_like(row, tokens.shape[1]) if count is None else count
        slots = first_rows(self.get_buffer("slots"), len(row))
        place = CachePosition(row, count, slots, bucket, padded=padded, tree=tree, in_order=True)
        return self(tokens, place, reads)  # type: ignore[no-any-return]

    def real_rows(self, sampling: SamplingTensors, window: int | Tensor) -> Tensor | None:
        """Number of rows of a window that are needed in every slot, [B] int32; None: all rows are computed anyway."""
        return sampling.seated * window if self.skips_idle else None

    def compact_path(self, row: Tensor, path: Tensor) -> None:
        """Make the accepted rows of a tree consecutive; row [B] of the root, path [B, D]."""
        row = row.clamp(max=self.options.n_positions - 1)
        slots = first_rows(self.get_buffer("slots"), len(row))
        for layer in self.caches:
            self.kernels.compact_path(layer, row, path, slots=slots)

    def copy_prompt(self, slot: int, like: int, count: int) -> None:
        """Copy the first ``count`` rows of slot ``like`` to ``slot``. Called outside graphs, on a local cache."""
        for layer in self.caches:
            for one in layer:
                one[slot, :, :count] = one[like, :, :count]

    def logits(self, hidden: Tensor, real: Tensor | None = None) -> Tensor:
        """[b, T, H] -> [b, T, V] float32, on every rank; ``real`` [b]: zeros after that many rows, where skipped."""
        return whole(self.model.logits(hidden, real), self.config.vocab_size, self.group)

    @property
    def shared(self) -> SharedHead:
        """Weights that drafters share with the target."""
        return SharedHead(self.model.embedding, self.model.head, self.model.ids, self.group)

    def sample_tokens(
        self, hidden: Tensor, positions: Tensor, sampling: SamplingTensors, *, used: Tensor | None = None
    ) -> Tensor:
        """The tokens that `Kernels.sample_tokens` samples from `logits`, which a sharded model need not gather for it.

        hidden [b, T, H], positions [b, T] int32, used [b] as in `window` -> [b, T] int32; any id in rows not used
        """
        part, rows = VocabPart(self.model.ids, self.config.vocab_size, self.group), hidden.shape[1]
        real = self.real_rows(sampling, rows if used is None else used)
        if real is None:
            return choose(self.model.logits(hidden), positions, sampling, part=part, kernels=self.kernels)
        # Logits are the largest part of a round's work: those of rows that are not used are neither written nor read.
        if used is not None:
            within = torch.arange(rows, dtype=torch.int32, device=hidden.device) < real.unsqueeze(1)
            positions = torch.where(within, positions, PAD)
        return choose(self.model.logits(hidden, -1 - real), positions, sampling, part=part, kernels=self.kernels)


class FeatureBuffer(nn.Module):
    """Hidden states kept between two rounds, as a state that graphs share. [B, W, F] float32"""

    features: Tensor

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("features", torch.zeros(*shape))


def load_rank(
    path: str, config: ModelConfig, options: DecoderOptions, *, kernels: Kernels, rank: int, group: Collectives
) -> ModelWithCache:
    """Load a rank's shard of a model from a checkpoint."""
    load = options.load
    weights = load_weights(
        path,
        config,
        options.dtype,
        shard=Shard(config, options.layout, rank),
        quantization=load.quantization,
        modules_to_not_convert=load.modules_to_not_convert,
        blocks=BACKENDS[load.backend].blocks,
    )
    return ModelWithCache(config, options, weights, kernels=kernels, rank=rank, group=group).eval()


class CompiledDecoder:
    """One model on one backend.

    ``on_graph`` is called when a compiler begins, and again when a graph is ready. ``last_holder``: the last caller of
    `held_by`, whose sequences the slots hold. ``batch_buckets``: numbers of slots for which rounds have graphs,
    ascending.
    """

    def __init__(self, config: ModelConfig, options: DecoderOptions, weights: Weights, *, backend: Backend) -> None:
        self.config, self.options, self.backend = config, options, backend
        self.kv_buckets = backend.kv_buckets(options.kv_buckets)
        one_graph = backend.kernels.skips_padding or not options.batch_buckets
        self.batch_buckets = (options.batch_size,) if one_graph else options.batch_buckets
        self.body = ModelWithCache(config, options, weights, kernels=backend.kernels, group=backend.group).eval()
        self.on_graph: Callable[[GraphEvent], None] = log_compilation
        self.folder: Path | None = None
        self._steps: dict[tuple[GraphKey, int], Step] = {}
        self._owners: dict[int, object] = {}  # kept alive, so that no other object gets the same id
        self._used: list[tuple[Graph, Step]] = []
        self._carries: dict[tuple[int, ...], FeatureBuffer] = {}
        self._holder: object | None = None
        self.last_holder: object | None = None

    @property
    def backend_name(self) -> str:
        return self.backend.name

    @property
    def batch_size(self) -> int:
        return self.options.batch_size

    @property
    def n_positions(self) -> int:
        return self.options.n_positions

    @cached_property
    def prefix_cache(self) -> PrefixCache:
        """Prompts in the cache, from which later requests can copy."""
        return PrefixCache(1 if self.body.kernels.batch_invariant else self.options.chunks[-1])

    @property
    def on_host(self) -> bool:
        """Whether the whole cache is in this process's memory."""
        return not self.backend.device_state and self.backend.group.degree == 1

    def bucket_for(self, rows: int) -> int:
        """Return the smallest bucket that holds ``rows`` KV positions; the largest if none does."""
        return self.kv_buckets[min(bisect_left(self.kv_buckets, rows), len(self.kv_buckets) - 1)]

    def batch_for(self, used_slots: int | None) -> int:
        """Return `GraphKey.batch` of a round of the first ``used_slots`` slots: their smallest batch bucket."""
        if used_slots is None:
            return 0
        batch = self.batch_buckets[bisect_left(self.batch_buckets, used_slots)]
        return 0 if batch == self.batch_size else batch

    def sampling_kind(self, kind: SamplingKind) -> SamplingKind:
        """Return the sampling mode of the graph for a round of ``kind``: "full" if one graph serves all modes."""
        return kind if self.body.kernels.sampling_kinds else "full"

    def graph(
        self,
        key: GraphKey,
        make: StepMaker,
        example: Sequence[Tensor],
        *,
        guest: Callable[[], dict[str, object]] | None = None,
        owner: object | None = None,
    ) -> Step:
        """Return the step ``make(body, key.bucket)`` for the shapes of ``example``, made once per key and owner.

        ``guest`` gives facts of another model in the same step, and ``owner`` the object that holds that model: two
        models of one shape share an artefact and have separate steps.
        """
        step = self._steps.get((key, id(owner)))
        if step is None:
            self._owners[id(owner)] = owner
            facts = self.cache_key() if guest is None else {**self.cache_key(), "guest": guest()}
            shapes = [[str(x.dtype), list(x.shape)] for x in example]
            module = make(self.body, key.bucket)
            facts = {"graph": asdict(key), "inputs": shapes, "outside": cache.outside_sources(module), **facts}
            graph = Graph(key, module, tuple(example), facts)
            begin = perf_counter()
            step = self.backend.compile(graph, lambda message: self.on_graph(GraphEvent(key, message)))
            self._steps[key, id(owner)] = step
            self._used.append((graph, step))  # a failed step is not saved
            self.on_graph(GraphEvent(key, seconds=perf_counter() - begin))
        return step

    def forget(self, owner: object) -> None:
        """Drop the steps of an owner whose weights have changed: they may hold values that were computed from them."""
        gone = [key for key in self._steps if key[1] == id(owner)]
        steps = {id(self._steps.pop(key)) for key in gone}
        self._used = [(graph, step) for graph, step in self._used if id(step) not in steps]

    def graphs(self) -> list[tuple[Graph, Step]]:
        """Every graph requested so far, with its step."""
        return list(self._used)

    def carry(self, *shape: int) -> FeatureBuffer:
        """Return the buffer of that shape in which rounds keep hidden states for the next round."""
        if shape not in self._carries:
            self._carries[shape] = FeatureBuffer(shape)
        return self._carries[shape]

    def save(self, folder: str | Path) -> None:
        """Copy the compiled graphs made so far into ``folder``, to ship them; raise ArtefactError if there are none."""
        if not self._used:
            raise ArtefactError("save: expected compiled graphs, got none; call compile() or generate something first")
        self.backend.save([graph for graph, _ in self._used], Path(folder))

    def load(self, folder: str | Path) -> None:
        """Use graphs that ``save`` wrote; raise ArtefactError if none fit this model, its options and machine."""
        self.backend.load(Path(folder), self.cache_key())

    @contextmanager
    def held_by(self, holder: object, *, keeps_prompts_of: object | None = None) -> Iterator[None]:
        """Reserve the cache for one generation, or raise DecoderBusyError; the same holder may enter again.

        keeps_prompts_of  with prefix caching: the last call's holder, whose prompts stay if no other came in between
        """
        if self._holder is not None and self._holder is not holder:
            raise DecoderBusyError(
                "this decoder is in the middle of another generation; finish or close that one first, or load a "
                "second decoder"
            )
        before, self._holder = self._holder, holder
        if before is None:
            self.prefix_cache.begin(last=keeps_prompts_of, holder=self.last_holder)
        self.last_holder = holder
        try:
            yield
        finally:
            self._holder = before

    def sibling(self) -> CompiledDecoder:
        """Return another decoder over the same weights, with a separate cache and separate graphs; not over ranks."""
        if self.options.layout.degree > 1:
            raise ConfigurationError(
                "target: a model with tp_degree above 1 has one cache; load it once for each target"
            )
        shared = {id(weight): weight for weight in self.body.parameters()}
        sibling = copy.copy(self)
        sibling.body = copy.deepcopy(self.body, {**shared, id(self.body.kernels): self.body.kernels})
        sibling._steps, sibling._owners, sibling._used, sibling._carries = {}, {}, [], {}
        sibling.__dict__.pop("prefix_cache", None)  # it has its own cache
        sibling._holder = sibling.last_holder = None
        return sibling

    def close(self) -> None:
        """Release the processes of other ranks, if any; also done when the decoder is garbage-collected."""
        self.backend.close()

    def cache_key(self) -> dict[str, object]:
        """Facts on which every graph of this decoder depends, in addition to the source."""
        options = self.options
        shape = [options.batch_size, options.rows, options.n_positions]
        layout = [options.layout.degree, options.layout.gqa.value]
        key: dict[str, object] = {"config": self.config.fingerprint(), "amp": options.load.amp}
        key |= {"shape": shape, "layout": layout}
        if options.load.kv_cache_dtype is not None:
            key["kv_cache_dtype"] = options.load.kv_cache_dtype
        formats = [[n, m.format.value] for n, m in self.body.named_modules() if isinstance(m, PackedMatrix)]
        return {**key, "quantization": formats} if formats else key


def first_rows(x: Tensor, batch: int) -> Tensor:
    """Return the first ``batch`` batch rows of x [B, ...]; 0: all. Whole, it is the same tensor."""
    return x[:batch] if 0 < batch < len(x) else x


def for_all_slots(x: Tensor, slots: int, fill: Sequence[int] | Sequence[Sequence[int]] | int = 0) -> Tensor:
    """Pad x [R, ...] with ``fill``, a number or a whole batch row, to one batch row per slot. -> [slots, ...]"""
    missing = slots - len(x)
    if not missing:
        return x
    return torch.cat((x, x.new_tensor(fill).expand(missing, *x.shape[1:])))


def idle_tokens(width: int) -> list[int]:
    """Return a commit's batch row for a slot without a request."""
    return [0, *[PAD] * (width - 1)]
