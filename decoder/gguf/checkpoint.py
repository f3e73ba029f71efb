"""A GGUF file as a checkpoint: its configuration as config.json would have it, and its tensors as float32.

Which architectures there are is a table here. Keys that say nothing about the computation are passed over; those that
would change it in a way that is not implemented are refused by name, and so is every key that is not known. What the
keys mean is what llama.cpp's converter writes for Llama models and its `llama` graph reads:
https://github.com/ggml-org/llama.cpp

Numbers are dequantised by the `gguf` package, a piece at a time from the mapped file, so that beside the result no more
than a piece is held. Not here: tokenizers (`paceline.text.gguf_tokenizer`).
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
"""[head_dim / 2] float32: what each rotary frequency is divided by. Llama 3.1's scaling is written like this."""

_IGNORED = re.compile(r"blk\.\d+\.attn_rot_embd\.weight|rope_freqs\.weight")
"""Tensors that are no weights: frequencies that the metadata determine, and factors that `config` has read."""

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
"""From rows of a tensor as Hugging Face has it to their rows in the file, [n] -> [n]."""


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
    """The keys and values of a config.json. ``rope_freqs``: the tensor of that name, where there is one.

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
                f"{header.path}: llama.{key} = {keys.integer(key)} and heads of {head_dim} are not supported together; "
                "use a model whose heads are all of one size and rotated whole."
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
    """What Hugging Face calls a tensor; one that is not known keeps its name."""
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return _OUTER.get(name, name)


def row_order(header: GgufHeader, name: str) -> _RowOrder | None:
    """How the rows of the tensor that Hugging Face calls ``name`` are ordered in the file; None: as they are there.

    Rotary embeddings turn dimension i of a head together with i + D / 2 in Hugging Face's order. llama.cpp turns
    neighbours, so its converter writes the rows of queries and keys as (head, i, half) instead of (head, half, i).
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
            f"{header.path}: the key {key} (with the value {str(value)[:40]}) is not supported, and passing over it "
            "could change the model's output; use a model without it."
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
                f"{header.path}: {_ROPE_FREQS} and rope scaling of type {kind!r} are not supported together."
            )
        # Frequencies divided one by one, at any length of the text: longrope with a single set of factors.
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
        f"{header.path}: rope scaling of type {kind!r} (attn_factor {share}) is not supported; supported are none, "
        "linear, yarn, and the factors of Llama 3.1."
    )


def _optional(ids: tuple[int, ...] | None) -> int | None:
    return ids[0] if ids else None


def _ends(fields: Fields) -> int | list[int] | None:
    """The tokens that end a text: of the text itself, of a turn, and of a message to a tool."""
    groups = [fields.ids(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(token for group in groups if group for token in group))
    return ids[0] if len(ids) == 1 else ids or None


def _decimal(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 for 9.999999747378752e-06, as config.json would have it."""
    rounded = np.float32(value)
    return next(
        (short for digits in range(1, 10) if np.float32(short := float(f"{value:.{digits}g}")) == rounded), value
    )


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a GGUF architecture is said in Hugging Face's words: functions of its module, such as those of `llama`."""

    config: Callable[[GgufHeader, tuple[float, ...] | None], dict[str, object]]
    hugging_face_name: Callable[[str], str]
    row_order: Callable[[GgufHeader, str], _RowOrder | None]
    ignored: re.Pattern[str]


ARCHITECTURES = {"llama": Architecture(config, hugging_face_name, row_order, _IGNORED)}
"""By the value of `general.architecture`."""

_KEPT = {"Q8_0": WeightFormat.Q8_0, "Q4_0": WeightFormat.Q4_0, "Q4_1": WeightFormat.Q4_1}

_PIECE = 1 << 16  # numbers that are dequantised at a time


def read_checkpoint(path: Path) -> GgufHeader:
    """The header of a file that can be loaded.

    Raises:
        MissingWeightsError: the file is absent or truncated.
        CheckpointError: it is damaged.
        UnknownArchitectureError: its architecture or a tensor's type is not supported.
    """
    header = read_header(path)
    name = header.fields.text("general.architecture")
    if name not in ARCHITECTURES:
        raise UnknownArchitectureError(
            f"{path}: general.architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}."
        )
    checked: set[str] = set()
    for tensor, stored in header.tensors.items():
        if stored.type not in checked and not _can_dequantise(stored):
            raise UnknownArchitectureError(
                f"{path}: {tensor} has the type {stored.type}, which cannot be dequantised; use a file with other "
                "types, such as Q8_0, Q4_K or BF16."
            )
        checked.add(stored.type)
    return header


def read_config(path: Path) -> dict[str, object]:
    """The keys of a config.json that say the same as the file's metadata.

    Raises:
        CheckpointError: as `read_checkpoint`; or a key is missing or has a wrong value.
        UnknownArchitectureError: as `read_checkpoint`; or a key would change the computation in a way that is not
            implemented.
    """
    header = read_checkpoint(path)
    config = _architecture(header).config
    factors = header.tensors.get(_ROPE_FREQS)
    if factors is None:
        return config(header, None)
    values = _numbers(_mapped(path), factors, np.arange(factors.shape[0])) if len(factors.shape) == 1 else None
    if values is None or not bool((np.isfinite(values) & (values > 0)).all()):
        raise CheckpointError(f"{path} is damaged: {_ROPE_FREQS} holds no list of finite numbers above 0")
    return config(header, tuple(values.tolist()))


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A `paceline.decoder.weights.files.WeightFile`: tensors by the names and with the rows that Hugging Face has."""

    header: GgufHeader
    names: dict[str, str]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Open a file.

        Raises:
            CheckpointError, UnknownArchitectureError: as `read_checkpoint`; or two tensors are one to Hugging Face.
        """
        header = read_checkpoint(path)
        architecture = _architecture(header)
        stored = [name for name in header.tensors if not architecture.ignored.fullmatch(name)]
        names = {architecture.hugging_face_name(name): name for name in stored}
        if len(names) < len(stored):
            raise CheckpointError(f"{path} is damaged: it holds a tensor twice, by two names")
        return cls(header, names)

    def infos(self) -> dict[str, TensorInfo]:
        """Shapes; the type is what is read, not what is stored."""
        return {name: TensorInfo(self.header.tensors[stored].shape, "F32") for name, stored in self.names.items()}

    def read(self, name: str) -> Tensor:
        """The whole tensor, float32."""
        shape = self.header.tensors[self.names[name]].shape
        return self._rows(name, (0, shape[0]))

    def read_range(self, name: str, span: tuple[int, int], *, dim: int) -> Tensor:
        """See `paceline.decoder.weights.files.WeightFile`. Of columns, whole blocks are dequantised."""
        if dim == 0:
            return self._rows(name, span)
        shape = self.header.tensors[self.names[name]].shape
        return self._rows(name, (0, shape[0]), columns=span)

    def read_quantized(self, name: str, wanted: WeightFormat | None = None) -> QuantizedTensor | None:
        """See `paceline.decoder.weights.files.WeightFile`: Q8_0, Q4_0 and Q4_1."""
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
        for begin, end in _pieces(stored, span) if result.size else ():  # a rank may have nothing of a tensor
            rows = np.arange(begin, end)
            if order is not None:
                rows = order(rows)
            result[begin - span[0] : end - span[0]] = _numbers(_mapped(self.header.path), stored, rows, columns=columns)
        return torch.from_numpy(result)


def _architecture(header: GgufHeader) -> Architecture:
    return ARCHITECTURES[header.fields.text("general.architecture")]


def _mapped(path: Path) -> NDArray[Any]:
    # Anew for every piece: what was read of a mapping stays in memory until the mapping goes. A plain array is over it,
    # which is sliced faster.
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


def _pieces(stored: StoredTensor, span: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Rows, or numbers of a tensor with one dimension, in pieces."""
    numbers_of_a_row = int(np.prod(stored.shape[1:])) if len(stored.shape) > 1 else 1
    step = max(1, _PIECE // numbers_of_a_row)
    for begin in range(span[0], span[1], step):
        yield begin, min(begin + step, span[1])


def _numbers(
    data: NDArray[Any], stored: StoredTensor, rows: NDArray[Any], *, columns: tuple[int, int] | None = None
) -> NDArray[Any]:
    """Some rows of a tensor, float32; of a tensor with one dimension, some numbers."""
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
    """Whether the `gguf` package can: it is asked with one block of zeros."""
    from gguf import dequantize
    from gguf.constants import GGMLQuantizationType

    try:
        with np.errstate(all="ignore"):
            dequantize(np.zeros((1, stored.block[1]), np.uint8), GGMLQuantizationType[stored.type])
    except NotImplementedError:
        return False
    return True
