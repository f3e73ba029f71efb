"""A GGUF file as a checkpoint: its configuration as config.json would have it, and its tensors as float32.

`ARCHITECTURES` lists the supported architectures. Keys without effect on the computation are ignored; unknown keys, and
keys that ask for a computation that is not implemented, are rejected with an error that names the key. Meanings of keys
follow llama.cpp's converter for Llama models and its `llama` graph: https://github.com/ggml-org/llama.cpp

Numbers are dequantised by the `gguf` package, one piece at a time from the mapped file, so that memory holds the result
and one piece. Tokenizers are in `paceline.text.gguf_tokenizer`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import CheckpointError, UnknownArchitectureError
from paceline.decoder.gguf.header import GgufHeader, StoredTensor, read_header
from paceline.decoder.json_fields import Fields
from paceline.decoder.weights.files import TensorInfo
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import QuantizedTensor

_ROPE_FREQS = "rope_freqs.weight"
"""[head_dim / 2] float32: divisor of each rotary frequency. Llama 3.1's scaling is stored in this form."""

_IGNORED = re.compile(r"blk\.\d+\.attn_rot_embd\.weight|rope_freqs\.weight")
"""Ignored tensors: frequencies that the metadata determine, and factors that `config` has read."""

_READ = frozenset(
    {
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.attn_factor",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
_WITHOUT_EFFECT = frozenset({"tensor_data_layout", "rope.scaling.finetuned"})
_NEUTRAL: dict[str, object] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "attention.sliding_window": 0,
    "pooling_type": 0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
}
"""Keys whose other values would change the computation."""

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROTATED = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(weight|bias)")

_RowOrder = Callable[[NDArray[Any]], NDArray[Any]]
"""Maps row numbers of a tensor in Hugging Face's order to row numbers in the file, [n] -> [n]."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """The metadata below the architecture's prefix."""

    fields: Fields

    def integer(self, key: str, default: int | None = None) -> int:
        return self.fields.integer(f"llama.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        return _decimal(self.fields.number(f"llama.{key}", default))

    def has(self, key: str) -> bool:
        return self.fields.values.get(f"llama.{key}") is not None


def config(header: GgufHeader, rope_freqs: tuple[float, ...] | None) -> dict[str, object]:
    """Return the keys and values of a config.json. ``rope_freqs``: the tensor of that name, if the file has one.

    Raises:
        CheckpointError: a key is missing or has a wrong value.
        UnknownArchitectureError: a key would change the computation in a way that is not implemented.
    """
    _refuse_keys(header)
    keys, fields = _Keys(header.fields), header.fields
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise UnknownArchitectureError(
                f"{header.path}: llama.{key}: expected {head_dim}, the size of a head, got {keys.integer(key)}; use "
                "a model whose heads have one size and are rotated in full"
            )
    positions = keys.integer("context_length")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": keys.integer("vocab_size", _num_tokens(header)),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": positions,
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header, keys, rope_freqs),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "bos_token_id": _optional(fields.ids("tokenizer.ggml.bos_token_id")),
        "eos_token_id": _ends(fields),
        "pad_token_id": _optional(fields.ids("tokenizer.ggml.padding_token_id")),
    }


def hugging_face_name(name: str) -> str:
    """Return Hugging Face's name of a tensor; an unknown name is unchanged."""
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return _OUTER.get(name, name)


def row_order(header: GgufHeader, name: str) -> _RowOrder | None:
    """Return the row order in the file of the tensor that Hugging Face calls ``name``; None: the same order.

    Rotary embeddings rotate dimension i of a head together with i + D / 2 in Hugging Face's order. llama.cpp rotates
    adjacent dimensions, so its converter writes the rows of queries and keys as (head, i, half) instead of (head, half,
    i).
    """
    if not _ROTATED.fullmatch(name):
        return None
    keys = _Keys(header.fields)
    heads = keys.integer("attention.head_count")
    dim = keys.integer("attention.key_length", max(1, keys.integer("embedding_length") // heads))

    def order(rows: NDArray[Any]) -> NDArray[Any]:
        head, inner = np.divmod(rows, dim)
        half, index = np.divmod(inner, dim // 2)
        stored: NDArray[Any] = head * dim + 2 * index + half
        return stored

    return order


def _refuse_keys(header: GgufHeader) -> None:
    for key, value in header.metadata.items():
        name = key.removeprefix("llama.")
        if name == key or name in _READ or name in _WITHOUT_EFFECT or (name in _NEUTRAL and value == _NEUTRAL[name]):
            continue
        raise UnknownArchitectureError(
            f"{header.path}: key {key} = {str(value)[:40]} is not supported, and ignoring it could change the "
            "output; use a model without it"
        )


def _num_tokens(header: GgufHeader) -> int | None:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else None


def _rope_scaling(header: GgufHeader, keys: _Keys, rope_freqs: tuple[float, ...] | None) -> dict[str, object] | None:
    kind = header.fields.text("llama.rope.scaling.type", "linear" if keys.has("rope.scale_linear") else "none")
    positions = keys.integer("context_length")
    if rope_freqs is not None:
        if kind != "none":
            raise UnknownArchitectureError(
                f"{header.path}: expected either {_ROPE_FREQS} or rope scaling, got both ({kind!r}); use another model"
            )
        # Frequencies divided one by one, at any sequence length: longrope with a single set of factors.
        factors = list(rope_freqs)
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": positions,
        }
    if kind == "none":
        return None
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    share = keys.number("rope.scaling.attn_factor", 1.0)
    if kind == "linear" and share == 1.0:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = keys.integer("rope.scaling.original_context_length", positions)
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": share * (1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0),
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    raise UnknownArchitectureError(
        f"{header.path}: rope scaling: expected none, linear, yarn or the factors of Llama 3.1, got {kind!r} "
        f"(attn_factor {share}); use another model"
    )


def _optional(ids: tuple[int, ...] | None) -> int | None:
    return ids[0] if ids else None


def _ends(fields: Fields) -> int | list[int] | None:
    """Return the tokens that stop a sequence: end of text, of a turn, and of a message to a tool."""
    groups = [fields.ids(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(token for group in groups if group for token in group))
    return ids[0] if len(ids) == 1 else ids or None


def _decimal(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-05 for 9.999999747378752e-06, as config.json would have
    it.
    """
    rounded = np.float32(value)
    return next(
        (short for digits in range(1, 10) if np.float32(short := float(f"{value:.{digits}g}")) == rounded), value
    )


@dataclass(frozen=True, slots=True)
class Architecture:
    """Conversion of a GGUF architecture to Hugging Face's names: functions of its module, such as those of `llama`."""

    config: Callable[[GgufHeader, tuple[float, ...] | None], dict[str, object]]
    hugging_face_name: Callable[[str], str]
    row_order: Callable[[GgufHeader, str], _RowOrder | None]
    ignored: re.Pattern[str]


ARCHITECTURES = {"llama": Architecture(config, hugging_face_name, row_order, _IGNORED)}
"""Architectures by the value of `general.architecture`."""

_KEPT = {"Q8_0": WeightFormat.Q8_0, "Q4_0": WeightFormat.Q4_0, "Q4_1": WeightFormat.Q4_1}

_PIECE = 1 << 16  # numbers dequantised at a time


def read_checkpoint(path: Path) -> GgufHeader:
    """Return the header of a file after checking that it can be loaded.

    Raises:
        MissingWeightsError: the file is absent or truncated.
        CheckpointError: it is damaged.
        UnknownArchitectureError: its architecture or a tensor's type is not supported.
    """
    header = read_header(path)
    name = header.fields.text("general.architecture")
    if name not in ARCHITECTURES:
        raise UnknownArchitectureError(
            f"{path}: general.architecture: expected one of {', '.join(ARCHITECTURES)}, got {name!r}; use a "
            "supported model"
        )
    checked: set[str] = set()
    for tensor, stored in header.tensors.items():
        if stored.type not in checked and not _can_dequantise(stored):
            raise UnknownArchitectureError(
                f"{path}: tensor {tensor}: the type {stored.type} cannot be dequantised; use a file with other "
                "types, such as Q8_0, Q4_K or BF16"
            )
        checked.add(stored.type)
    return header


def read_config(path: Path) -> dict[str, object]:
    """Return the keys of a config.json equivalent to the file's metadata.

    Raises:
        CheckpointError: see `read_checkpoint`; or a key is missing or has a wrong value.
        UnknownArchitectureError: see `read_checkpoint`; or a key would change the computation in a way that is not
            implemented.
    """
    header = read_checkpoint(path)
    config = _architecture(header).config
    factors = header.tensors.get(_ROPE_FREQS)
    if factors is None:
        return config(header, None)
    values = _numbers(_mapped(path), factors, np.arange(factors.shape[0])) if len(factors.shape) == 1 else None
    if values is None or not bool((np.isfinite(values) & (values > 0)).all()):
        raise CheckpointError(
            f"{path}: expected finite numbers above 0 in {_ROPE_FREQS}, got others; download the file again"
        )
    return config(header, tuple(values.tolist()))


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A `paceline.decoder.weights.files.WeightFile`: tensors with Hugging Face's names and row order."""

    header: GgufHeader
    names: dict[str, str]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Open a file.

        Raises:
            CheckpointError, UnknownArchitectureError: see `read_checkpoint`; or two tensors have one Hugging Face name.
        """
        header = read_checkpoint(path)
        architecture = _architecture(header)
        stored = [name for name in header.tensors if not architecture.ignored.fullmatch(name)]
        names = {architecture.hugging_face_name(name): name for name in stored}
        if len(names) < len(stored):
            raise CheckpointError(
                f"{path}: expected every tensor once, got one under two names; download the file again"
            )
        return cls(header, names)

    def infos(self) -> dict[str, TensorInfo]:
        """Shapes, and the dtypes that `read` returns rather than the stored types."""
        return {name: TensorInfo(self.header.tensors[stored].shape, "F32") for name, stored in self.names.items()}

    def read(self, name: str) -> Tensor:
        """Return the whole tensor, float32."""
        shape = self.header.tensors[self.names[name]].shape
        return self._rows(name, (0, shape[0]))

    def read_range(self, name: str, span: tuple[int, int], *, dim: int) -> Tensor:
        """Read rows or columns ``span`` of a tensor. For columns, whole blocks are dequantised."""
        if dim == 0:
            return self._rows(name, span)
        shape = self.header.tensors[self.names[name]].shape
        return self._rows(name, (0, shape[0]), columns=span)

    def read_quantized(self, name: str, wanted: WeightFormat | None = None) -> QuantizedTensor | None:
        """Read a tensor of Q8_0, Q4_0 or Q4_1 without dequantising it."""
        stored = self.header.tensors[self.names[name]]
        form = _KEPT.get(stored.type)
        if form is None or len(stored.shape) != 2 or wanted not in (None, form):
            return None
        order = _architecture(self.header).row_order(self.header, name)
        rows = np.empty((stored.shape[0], stored.row_bytes), np.uint8)
        for begin, end in _pieces(stored, (0, stored.shape[0])):
            piece = np.arange(begin, end)
            raw = _mapped(self.header.path)[stored.offset : stored.offset + stored.num_bytes]
            rows[begin:end] = raw.reshape(stored.shape[0], -1)[piece if order is None else order(piece)]
        return QuantizedTensor(torch.from_numpy(rows), None, form, stored.shape[1])

    def _rows(self, name: str, span: tuple[int, int], *, columns: tuple[int, int] | None = None) -> Tensor:
        stored = self.header.tensors[self.names[name]]
        order = _architecture(self.header).row_order(self.header, name)
        width = stored.shape[1:] if columns is None else (columns[1] - columns[0],)
        result = np.empty((span[1] - span[0], *width), np.float32)
        for begin, end in _pieces(stored, span) if result.size else ():  # a rank may have an empty part
            rows = np.arange(begin, end)
            if order is not None:
                rows = order(rows)
            result[begin - span[0] : end - span[0]] = _numbers(_mapped(self.header.path), stored, rows, columns=columns)
        return torch.from_numpy(result)


def _architecture(header: GgufHeader) -> Architecture:
    return ARCHITECTURES[header.fields.text("general.architecture")]


def _mapped(path: Path) -> NDArray[Any]:
    # Mapped again for every piece: pages read from a mapping stay in memory until it is closed. It is wrapped in a
    # plain array, which is sliced faster.
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


def _pieces(stored: StoredTensor, span: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows, or of numbers for a one-dimensional tensor, in pieces."""
    numbers_of_a_row = int(np.prod(stored.shape[1:])) if len(stored.shape) > 1 else 1
    step = max(1, _PIECE // numbers_of_a_row)
    for begin in range(span[0], span[1], step):
        yield begin, min(begin + step, span[1])


def _numbers(
    data: NDArray[Any], stored: StoredTensor, rows: NDArray[Any], *, columns: tuple[int, int] | None = None
) -> NDArray[Any]:
    """Return some rows of a tensor, float32; of a one-dimensional tensor, some numbers."""
    from gguf import dequantize
    from gguf.constants import GGMLQuantizationType

    kind, (numbers, size) = GGMLQuantizationType[stored.type], stored.block
    raw = data[stored.offset : stored.offset + stored.num_bytes]
    if len(stored.shape) == 1:
        values: NDArray[Any] = dequantize(np.array(raw), kind)[rows]
        return values
    raw = raw.reshape(stored.shape[0], -1)
    if columns is None:
        return dequantize(raw[rows], kind).reshape(len(rows), *stored.shape[1:])
    first, last = columns[0] // numbers, -(-columns[1] // numbers)
    values = dequantize(np.ascontiguousarray(raw[rows, first * size : last * size]), kind)
    return values[:, columns[0] - first * numbers : columns[1] - first * numbers]


def _can_dequantise(stored: StoredTensor) -> bool:
    """Return whether the `gguf` package can dequantise this type: tries one block of zeros."""
    from gguf import dequantize
    from gguf.constants import GGMLQuantizationType

    try:
        with np.errstate(all="ignore"):
            dequantize(np.zeros((1, stored.block[1]), np.uint8), GGMLQuantizationType[stored.type])
    except NotImplementedError:
        return False
    return True
