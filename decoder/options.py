"""Options for loading a decoder, checked and completed; no facts about the model itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigurationError
from paceline.decoder.backends import registry
from paceline.decoder.backends.registry import BACKENDS
from paceline.decoder.parallel.sharding import GQA, WHOLE, Layout
from paceline.decoder.weights.formats import CACHE_FORMATS, WeightFormat

if TYPE_CHECKING:
    import torch

AMP = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
"""PyTorch's dtype names, by the values of the option ``amp``."""

_AMP_NAMES = {full: short for short, full in AMP.items()} | {"auto": "bf16", "half": "f16", "float": "f32"}
"""Values of ``amp`` by PyTorch's and vLLM's names."""

ALIASES = {
    "dtype": "amp",
    "max_model_len": "n_positions",
    "max_num_seqs": "batch_size",
    "tensor_parallel_size": "tp_degree",
    "num_speculative_tokens": "k",
    "enable_prefix_caching": "prefix_caching",
}
"""vLLM's names of options, with Paceline's."""

MAX_WIDTH = 128
"""Largest number of rows of one window; caches have the same number of slack rows, so that no window runs over their
end.
"""

CATCH_UP = 16
"""Tokens of the smallest prefill graph of a draft. The commits it missed in a round or two, while a free drafter
proposed, are not longer, and a graph of 64 rows takes about three times as long.
"""


def option(default: Any, text: str | None = None, **more: object) -> Any:
    """Return a field with its text in the help of commands (None: no option of one). ``more``: ``names``, its flags if
    they are not made of its name; ``envvar``, its environment variable.
    """
    return field(default=default, metadata={"help": text, **more})


@contextmanager
def renamed(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield options by Paceline's names; an error inside has the user's name of its option.

    Raises:
        ConfigurationError: an option is given by two names.
    """
    aliases = {ALIASES[name]: name for name in options if name in ALIASES}
    for own, alias in aliases.items():
        if own in options:
            raise ConfigurationError(f"{alias}: expected {alias} or {own}, its other name, got both; give one of them")
    try:
        yield {ALIASES.get(name, name): value for name, value in options.items()}
    except ConfigurationError as error:
        name = re.match(r"(?:.*: )?(\w+)(?=: expected)", str(error))
        if name is None or name[1] not in aliases:
            raise
        raise type(error)(str(error)[: name.start(1)] + aliases[name[1]] + str(error)[name.end(1) :]) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options for loading a decoder, each declared in this class and nowhere else: Python
    (`AutoDecoder.from_pretrained`, `NeuronConfig`), the command line, models files, workers and experiments take these
    fields. A list becomes a tuple; a value that is unknown or out of range is a ConfigurationError.
    """

    backend: str = option("native", f"Backend that runs the model: {', '.join(BACKENDS)}.")
    amp: str = option("bf16", "Number format of weights and cache: bf16, f16 or f32.")
    batch_size: int | Sequence[int] = option(
        1,
        "Number of requests decoded at the same time. Backends that compute idle slots (all but native) have "
        "separate graphs for the first 1, 2, 4, ... slots (Neuron: a quarter of them); an ascending list sets these "
        "numbers.",
    )
    n_positions: int | Sequence[int] | None = option(
        None,
        "Maximum number of tokens of a sequence, prompt included. Default: the model's. The cache length has "
        "buckets 128, 256, ... up to it (Neuron: a quarter of it, and it); an ascending list sets them.",
    )
    context_length_estimate: Sequence[int] | int | None = option(
        None, "Number of tokens of a prefill graph, or several. Default: 64 and 256."
    )
    tp_degree: int = option(
        1,
        "Tensor-parallel degree: number of ranks that each model is sharded over; above 1 with eager, neuron and "
        "neuron-native.",
    )
    group_query_attention: GQA | str | None = option(  # noqa: RUF009  # like the others
        None,
        "Sharding of K/V heads: shard-over-heads, replicated-heads or all-gather-heads. Default: shard-over-heads "
        "where they divide evenly, else replicated-heads.",
    )
    quantization: str | None = option(
        None,
        f"Format of the weight matrices: {', '.join(item.value for item in WeightFormat)}, or gguf to keep a GGUF "
        "file's. Default: the format of amp.",
    )
    kv_cache_dtype: str | None = option(
        None, "Format of keys and values: int8 or fp8_e4m3. Default: the format of amp."
    )
    modules_to_not_convert: Sequence[str] = option(
        (),
        "Matrices that quantization leaves alone: lm_head, embed_tokens or both (tied ones always together). "
        "Default: none.",
    )

    def __post_init__(self) -> None:
        registry.check(self.backend)
        if isinstance(self.amp, str):
            object.__setattr__(self, "amp", _AMP_NAMES.get(self.amp, self.amp))
        if self.amp not in [*AMP]:
            raise ConfigurationError(f"amp: expected one of {', '.join(AMP)}, got {self.amp!r}; use one of them")
        for name in ("batch_size", "n_positions", "context_length_estimate"):
            if (value := getattr(self, name)) is not None or name == "batch_size":
                _ascending(name, value)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        if not isinstance(self.tp_degree, int) or isinstance(self.tp_degree, bool) or self.tp_degree < 1:
            raise ConfigurationError(
                f"tp_degree: expected a number of ranks of at least 1, got {self.tp_degree!r}; correct it"
            )
        if self.group_query_attention is not None:
            object.__setattr__(self, "group_query_attention", GQA.of(self.group_query_attention).value)
        if self.quantization not in (None, "gguf"):
            WeightFormat.of(self.quantization)
        caches = [form.value for form in CACHE_FORMATS]
        if self.kv_cache_dtype is not None and self.kv_cache_dtype not in caches:
            raise ConfigurationError(
                f"kv_cache_dtype: expected one of {', '.join(caches)}, got {self.kv_cache_dtype!r}; use one of "
                "them, or omit it to store keys and values as amp says"
            )
        if not isinstance(modules := self.modules_to_not_convert, list | tuple):
            raise ConfigurationError(f"modules_to_not_convert: expected a list of names, got {modules!r}; correct it")
        object.__setattr__(self, "modules_to_not_convert", tuple(modules))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> LoadOptions:
        """Return these options, also by vLLM's names; raise ConfigurationError if one is unknown."""
        names = [one.name for one in fields(cls)]
        with renamed(options) as own:
            for name in own:
                if name not in names:
                    raise ConfigurationError(f"{name}: not an option of a decoder; use one of {', '.join(names)}")
            return cls(**own)

    @classmethod
    def part_of(cls, values: Mapping[str, Any]) -> LoadOptions:
        """Return the options among other keys; absent options have their defaults."""
        return cls(**{one.name: values[one.name] for one in fields(cls) if one.name in values})

    @property
    def slots(self) -> int:
        """The largest batch size."""
        return self.batch_size if isinstance(self.batch_size, int) else self.batch_size[-1]

    @property
    def chunks(self) -> Sequence[int]:
        """Lengths of the prefill graphs, ascending."""
        lengths = (64, 256) if self.context_length_estimate is None else self.context_length_estimate
        return (lengths,) if isinstance(lengths, int) else lengths

    def longest(self, trained: int) -> int:
        """Return the longest sequence of a model whose own context is ``trained``."""
        if self.n_positions is None:
            return trained
        return self.n_positions if isinstance(self.n_positions, int) else self.n_positions[-1]


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """The options of a decoder, completed from its model.

    load           the requested options, some of them unset
    kv_buckets     buckets of the cache length, ascending; the last is the longest sequence (n_positions)
    chunks         lengths of the prefill graphs, ascending; longer prompts are prefilled in chunks of the largest
    layout         number of ranks, and how the model is sharded over them
    batch_buckets  numbers of slots for which rounds have graphs, ascending, the last is ``batch_size``; ():
                   ``batch_size`` only
    """

    load: LoadOptions
    kv_buckets: tuple[int, ...]
    chunks: tuple[int, ...]
    layout: Layout = WHOLE
    batch_buckets: tuple[int, ...] = ()

    @property
    def batch_size(self) -> int:
        """Number of slots; fixed, a slot without a request idles."""
        return self.load.slots

    @property
    def n_positions(self) -> int:
        return self.kv_buckets[-1]

    @property
    def draft_chunks(self) -> tuple[int, ...]:
        """Lengths of the prefill graphs of a draft, which also catches up with them."""
        return self.chunks if self.chunks[0] <= CATCH_UP else (CATCH_UP, *self.chunks)

    @property
    def rows(self) -> int:
        """Rows of a cache: all positions, and slack for a window or a padded chunk that begins at the last one."""
        return self.n_positions + max(MAX_WIDTH, self.chunks[-1])

    @property
    def dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, AMP[self.load.amp])
        return dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """Type of the tensors of the model's own cache; caches of draft heads have ``dtype``."""
        return self.dtype if self.load.kv_cache_dtype is None else WeightFormat(self.load.kv_cache_dtype).dtype


def check_width(width: int) -> None:
    """Raise ConfigurationError unless a window of ``width`` rows fits."""
    if not 1 <= width <= MAX_WIDTH:
        raise ConfigurationError(f"k: expected 1 to {MAX_WIDTH} verified tokens (k + 1), got {width}; lower k")


def decoder_options(load: LoadOptions, trained: int, layout: Layout = WHOLE) -> DecoderOptions:
    """Complete the options of a decoder; ``trained`` is the model's own context, beyond which none may go."""
    steps = _quarter if BACKENDS[load.backend].slow else _powers
    batches = steps(load.slots, first=1) if isinstance(load.batch_size, int) else tuple(load.batch_size)
    last = load.longest(trained)
    if last > trained:
        raise ConfigurationError(
            f"n_positions: expected at most {trained}, which the model was trained on (max_position_embeddings), "
            f"got {last}; lower it"
        )
    kv_buckets = steps(last) if isinstance(load.n_positions, int | None) else tuple(load.n_positions)
    chunks = tuple(sorted({min(chunk, last) for chunk in load.chunks}))
    whole = replace(load, batch_size=batches, n_positions=kv_buckets, context_length_estimate=chunks)
    return DecoderOptions(whole, kv_buckets, chunks, layout, batches)


def _ascending(name: str, one_or_more: object) -> None:
    values = one_or_more if isinstance(one_or_more, (list, tuple)) else (one_or_more,)
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if not values or len(numbers) < len(values) or numbers[0] < 1 or any(a >= b for a, b in pairwise(numbers)):
        raise ConfigurationError(
            f"{name}: expected a positive number or an ascending list of them, got {one_or_more!r}; correct it"
        )


def _quarter(last: int, first: int = 128) -> tuple[int, ...]:
    """Return a quarter of ``last``, a multiple of ``first``, if it is that much, and ``last``."""
    part = last // 4 // first * first
    return (part, last) if part else (last,)


def _powers(last: int, first: int = 128) -> tuple[int, ...]:
    buckets = []
    bucket = first
    while bucket < last:
        buckets.append(bucket)
        bucket *= 2
    return (*buckets, last)
