"""A GGUF file as a checkpoint: its configuration as config.json would have it, and its tensors as float32.

What keys mean is in `paceline.decoder.gguf.architectures`, a row for each architecture. Numbers are
dequantised by the `gguf` package, one piece at a time from the mapped file, so that memory holds the result and one
piece. Tokenizers are in `paceline.text.gguf_tokenizer`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import CheckpointError, UnknownArchitectureError
from paceline.decoder.gguf.architectures import Architecture, architecture
from paceline.decoder.gguf.header import GgufHeader, StoredTensor, read_header
from paceline.decoder.gguf.keys import FACTORS, Keys
from paceline.decoder.gguf.layout import Piece, pieces
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.family import Family
from paceline.decoder.weights.files import TensorInfo
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import QuantizedTensor

_KEPT = {"Q8_0": WeightFormat.Q8_0, "Q4_0": WeightFormat.Q4_0, "Q4_1": WeightFormat.Q4_1}

_PIECE = 1 << 16  # numbers dequantised at a time


def read_checkpoint(path: Path) -> GgufHeader:
    """Return the header of a file, or of all parts of a model, after checking that it can be loaded."""
    header = read_header(path)
    architecture(header)
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
    """Return the keys of a config.json equivalent to the file's metadata; raise a CheckpointError if there is none."""
    header = read_checkpoint(path)
    found: dict[str, tuple[float, ...]] = {}
    for name in FACTORS:
        stored = header.tensors.get(name)
        if stored is None:
            continue
        values = _numbers(stored, np.arange(stored.shape[0])) if len(stored.shape) == 1 else None
        if values is None or not bool((np.isfinite(values) & (values > 0)).all()):
            raise CheckpointError(
                f"{path}: expected finite numbers above 0 in {name}, got others; download the file again"
            )
        found[name] = tuple(values.tolist())
    return _config(header, found)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A `paceline.decoder.weights.files.WeightFile`: tensors with Hugging Face's names and row order."""

    header: GgufHeader
    pieces: dict[str, Piece]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        header = read_checkpoint(path)
        return cls(header, pieces(header))

    def infos(self) -> dict[str, TensorInfo]:
        """Shapes, and the dtypes that `read` returns rather than the stored types."""
        return {name: TensorInfo(self._shape(piece), "F32") for name, piece in self.pieces.items()}

    def read(self, name: str) -> Tensor:
        return self.read_range(name, (0, self._shape(self.pieces[name])[0]), dim=0)

    def read_range(self, name: str, span: tuple[int, int], *, dim: int) -> Tensor:
        """Read rows or columns ``span`` of a tensor. For columns of the stored one, whole blocks are dequantised."""
        piece = self.pieces[name]
        if (dim == 0) is not piece.transposed:
            found = self._rows(piece, span)
        else:
            found = self._rows(piece, (0, piece.rows), columns=span)
        return found.t() if piece.transposed else found

    def read_quantized(self, name: str, wanted: WeightFormat | None = None) -> QuantizedTensor | None:
        """Read a matrix [out, in] of Q8_0, Q4_0 or Q4_1 without dequantising it."""
        piece = self.pieces[name]
        if piece.keys or piece.number is not None:
            return None
        stored = self.header.tensors[piece.stored]
        form = _KEPT.get(stored.type)
        if form is None or len(stored.shape) < 2 or wanted not in (None, form):
            return None
        rows = np.empty((piece.rows, stored.row_bytes), np.uint8)
        for begin, end in _spans(stored, (0, piece.rows)):
            rows[begin:end] = _raw(stored)[_places(piece, begin, end)]
        return QuantizedTensor(torch.from_numpy(rows), None, form, stored.shape[-1])

    def _shape(self, piece: Piece) -> tuple[int, ...]:
        """The shape in a checkpoint: a vector of numbers in a row, where it has a router of one output."""
        if piece.number is not None:
            return (1,)
        stored = self.header.tensors[piece.stored].shape
        shape = (piece.rows, *stored[-1:]) if len(stored) > 1 else (piece.rows,)
        if piece.single:
            return (1, stored[-1])
        if piece.vector:
            return stored[-1:]
        return shape[::-1] if piece.transposed else shape

    def _rows(self, piece: Piece, span: tuple[int, int], *, columns: tuple[int, int] | None = None) -> Tensor:
        if piece.number is not None:
            return torch.tensor([piece.number])[slice(*span)]
        stored = self.header.tensors[piece.stored]
        if piece.keys:
            return self._both(stored, self.header.tensors[piece.keys])[slice(*span), slice(*columns or (None,))]
        if piece.vector:
            return torch.from_numpy(_numbers(stored, np.array([piece.first]))[0, slice(*span)].copy())
        if piece.single:
            whole = _numbers(stored, np.arange(stored.shape[0])).reshape(1, -1)
            return torch.from_numpy(whole[span[0] : span[1], slice(*columns) if columns else slice(None)].copy())
        width = stored.shape[-1:] if len(stored.shape) > 1 else ()
        width = width if columns is None else (columns[1] - columns[0],)
        result = np.empty((span[1] - span[0], *width), np.float32)
        for begin, end in _spans(stored, span) if result.size else ():  # a rank may have an empty part
            found = _numbers(stored, _places(piece, begin, end), columns=columns)
            result[begin - span[0] : end - span[0]] = found
        return torch.from_numpy(result - np.float32(piece.shift) if piece.shift else result)

    def _both(self, values: StoredTensor, keys: StoredTensor) -> Tensor:
        """Keys [heads, in, n] and values [heads, m, in] of latent attention as rows of both, head by head."""
        v, k = (
            torch.from_numpy(_numbers(one, np.arange(math.prod(one.shape[:-1])))).view(one.shape)
            for one in (values, keys)
        )
        return torch.cat((k.transpose(1, 2), v), 1).flatten(0, 1)


def _places(piece: Piece, begin: int, end: int) -> NDArray[Any]:
    """The rows of the stored tensor in which rows of a piece lie."""
    rows = np.arange(begin, end)
    return piece.first + (rows if piece.order is None else piece.order(rows))


def _raw(stored: StoredTensor) -> NDArray[Any]:
    """The bytes of a tensor, a row for each; of a one-dimensional tensor, one row."""
    # Mapped again for every piece: pages read from a mapping stay in memory until it is closed. It is wrapped in a
    # plain array, which is sliced faster.
    data = np.asarray(np.memmap(stored.path, dtype=np.uint8, mode="r"))
    return data[stored.offset : stored.offset + stored.num_bytes].reshape(-1, stored.row_bytes)


def _spans(stored: StoredTensor, span: tuple[int, int]) -> Iterator[tuple[int, int]]:
    numbers_of_a_row = stored.shape[-1] if len(stored.shape) > 1 else 1
    step = max(1, _PIECE // numbers_of_a_row)
    for begin in range(span[0], span[1], step):
        yield begin, min(begin + step, span[1])


def _numbers(stored: StoredTensor, rows: NDArray[Any], *, columns: tuple[int, int] | None = None) -> NDArray[Any]:
    """Return some rows of a tensor, float32; of a one-dimensional tensor, some numbers."""
    from gguf import dequantize
    from gguf.constants import GGMLQuantizationType

    kind, (numbers, size) = GGMLQuantizationType[stored.type], stored.block
    raw = _raw(stored)
    if len(stored.shape) == 1:
        values: NDArray[Any] = dequantize(np.array(raw[0]), kind)[rows]
        return values
    if columns is None:
        return dequantize(raw[rows], kind).reshape(len(rows), stored.shape[-1])
    first, last = columns[0] // numbers, -(-columns[1] // numbers)
    values = dequantize(np.ascontiguousarray(raw[rows, first * size : last * size]), kind)
    return values[:, columns[0] - first * numbers : columns[1] - first * numbers]


def _can_dequantise(stored: StoredTensor) -> bool:
    """Try one block of zeros."""
    from gguf import dequantize
    from gguf.constants import GGMLQuantizationType

    try:
        with np.errstate(all="ignore"):
            dequantize(np.zeros((1, stored.block[1]), np.uint8), GGMLQuantizationType[stored.type])
    except NotImplementedError:
        return False
    return True


# ---- the configuration

_READ = frozenset(
    {
        "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.attn_factor", "rope.scaling.original_context_length", "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    }
)  # fmt: skip
"""Keys that every architecture may have, below its prefix."""

_WITHOUT_EFFECT = frozenset({"tensor_data_layout", "rope.scaling.finetuned"})
_NEUTRAL: dict[str, object] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_gating_func": 1,
    "expert_weights_scale": 1.0,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "nextn_predict_layers": 0,
    "attention.causal": True,
    "attention.sliding_window": 0,
    "pooling_type": 0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}
"""Keys whose other values would change the computation, where a row does not read them."""


def _config(header: GgufHeader, factors: Mapping[str, tuple[float, ...]]) -> dict[str, object]:
    """Return the keys and values of a config.json. ``factors``: those of `FACTORS` that the file has."""
    row = architecture(header)
    keys, fields = Keys(header, header.fields.text("general.architecture"), factors), header.fields
    _refuse_keys(keys, row)
    hidden, head_dim = keys.integer("embedding_length"), keys.head_dim
    embedding = header.tensors.get("token_embd.weight")
    rows = None if embedding is None else embedding.shape[0]
    scaling = _rope_scaling(keys, truncate=row.truncate)
    return {
        "model_type": row.family,
        "vocab_size": keys.integer("vocab_size", _num_tokens(header) or rows),
        "hidden_size": hidden,
        "intermediate_size": keys.integer(
            "feed_forward_length", 1 if "expert_feed_forward_length" in row.reads else None
        ),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": keys.heads,
        "num_key_value_heads": keys.key_heads,
        "head_dim": head_dim,
        "rms_norm_eps": keys.number(row.epsilon),
        "max_position_embeddings": keys.integer("context_length"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": scaling,
        "rope_parameters": None if scaling else {"rope_type": "default"},
        **_turned(keys, row.family_row()),
        "sliding_window": None,
        "tie_word_embeddings": not keys.holds("output.weight"),
        **{name: keys.holds(f"blk.0.{tensor}") for name, tensor in row.present.items()},
        **row.said,
        **row.more(keys),
        "bos_token_id": _optional(fields.ids("tokenizer.ggml.bos_token_id")),
        "eos_token_id": _ends(fields),
        "pad_token_id": _optional(fields.ids("tokenizer.ggml.padding_token_id")),
    }


def _refuse_keys(keys: Keys, row: Architecture) -> None:
    read = _READ | {row.epsilon, *row.reads}
    neutral = {**_NEUTRAL, **row.neutral}
    for key, value in keys.header.metadata.items():
        name = key.removeprefix(f"{keys.prefix}.")
        if name == key or name in read or (name in neutral and value == neutral[name]):
            continue
        if name in _WITHOUT_EFFECT and name not in neutral:
            continue
        raise UnknownArchitectureError(
            f"{keys.header.path}: the key {key} (with the value {str(value)[:40]}) is not supported, and passing over "
            "it could change the model's output; use a model without it."
        )


def _num_tokens(header: GgufHeader) -> int | None:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else None


def _turned(keys: Keys, family: Family) -> dict[str, object]:
    if "latent" in family.reads:  # whose keys in a file are those of the latent vector
        return {}
    width, rotated = keys.head_dim, keys.integer("rope.dimension_count", keys.head_dim)
    if keys.integer("attention.value_length", width) != width or (
        rotated != width and family.plan.rotated_share and "rotated_share" not in family.reads
    ):
        key = "attention.value_length" if rotated == width else "rope.dimension_count"
        raise UnknownArchitectureError(
            f"{keys.header.path}: {keys.prefix}.{key} = {keys.integer(key)} and heads of {width} are not supported "
            "together; use a model whose heads are all of one size and rotated whole."
        )
    if "rotated_share" not in family.reads:
        return {}
    share = rotated / width
    return {"partial_rotary_factor": share if int(width * share) == rotated else math.nextafter(share, 2.0)}


def _rope_scaling(keys: Keys, *, truncate: bool) -> dict[str, object] | None:
    scaled = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear")
    kind = keys.fields.text(f"{keys.prefix}.rope.scaling.type", "linear" if scaled else "none")
    positions = keys.integer("context_length")
    share = keys.number("rope.scaling.attn_factor", 1.0)
    freqs, short, long = (keys.factors.get(name) for name in FACTORS)
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0)) if scaled else 1.0
    original = keys.integer("rope.scaling.original_context_length", positions)
    longrope = {"rope_type": "longrope", "attention_factor": share, "original_max_position_embeddings": original}
    if freqs is not None and kind == "none" and share == 1.0 and short is None:
        # Frequencies divided one by one, at any sequence length: longrope with a single set of factors.
        return {**longrope, "short_factor": list(freqs), "long_factor": list(freqs),
                "original_max_position_embeddings": positions}  # fmt: skip
    if short is not None and long is not None and freqs is None and kind in ("none", "longrope") and factor == 1.0:
        return {**longrope, "short_factor": list(short), "long_factor": list(long)}
    if freqs is None and short is None and long is None:
        if kind in ("none", "linear") and share == 1.0:
            return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1.0 else None
        if kind == "yarn":
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
                "truncate": truncate,
                **_yarn_scale(keys, factor, share),
            }
    found = "".join(f" with {name}" for name in FACTORS if name in keys.factors)
    raise UnknownArchitectureError(
        f"{keys.header.path}: rope scaling of type {kind!r}{found} (factor {factor}, attn_factor {share}) is not "
        "supported; supported are none, linear, yarn, the factors of Llama 3.1, and longrope."
    )


def _yarn_scale(keys: Keys, factor: float, share: float) -> dict[str, object]:
    """Return how yarn makes scores larger. Files of latent attention have a tenth of the multiplier."""
    if multiplier := keys.unless_zero("rope.scaling.yarn_log_multiplier", None):
        latent = keys.get("attention.kv_lora_rank") is not None
        every = round(10 * multiplier, 6) if latent else multiplier
        scale = keys.unless_zero("attention.temperature_scale", None)
        sharper = {} if scale is None else {"llama_4_scaling_beta": scale}
        return {"mscale": every if latent else 1.0, "mscale_all_dim": every, **sharper}
    if keys.get("rope.scaling.yarn_attn_factor"):
        return {"attention_factor": keys.number("rope.scaling.yarn_attn_factor")}
    return {"attention_factor": share * (1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0)}


def _optional(ids: tuple[int, ...] | None) -> int | None:
    return ids[0] if ids else None


_ENDS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>",
        "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
        "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
    }
)  # fmt: skip
_FILLS = {
    "fim_pad": frozenset(["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"]),
    "fim_rep": frozenset(["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"]),
    "fim_sep": frozenset(["<|file_sep|>"]),
}
"""Tokens that end a piece of code that is filled in: by their key, or else by their text."""


def _ends(fields: Fields) -> int | list[int] | None:
    """Return the tokens that stop a sequence: those that the file names, and those that llama.cpp knows by their text.

    Of these, "<|end|>" only ends a message where "<|return|>" or "<|flush|>" and a call end a turn, and "</s>" is a
    word where "<|tool_response>" is a token.
    """
    groups = [fields.ids(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = [token for group in groups if group for token in group]
    tokens = fields.values.get("tokenizer.ggml.tokens")
    texts = tokens if isinstance(tokens, list) else []
    known = _ENDS.union(*_FILLS.values())
    found = {text: number for number, text in enumerate(texts) if isinstance(text, str) and text in known}
    for name, names in _FILLS.items():
        said = fields.ids(f"tokenizer.ggml.{name}_token_id")
        ids += said if said is not None else [found[text] for text in found if text in names]
    ids += [number for text, number in found.items() if text in _ENDS]
    ends_turn = {"<|return|>", "<|flush|>"} & found.keys() and {"<|call|>", "<|calls|>"} & found.keys()
    wrong = {found.get("<|end|>")} if ends_turn else set()
    if "<|tool_response>" in found:
        wrong.add(found.get("</s>"))
    ids = [token for token in dict.fromkeys(ids) if token not in wrong]
    return ids[0] if len(ids) == 1 else ids or None
