"""Tensors of a GGUF file as those of a checkpoint: their names, and the order in which the converter writes rows.

Nothing is read here but the header. What keys mean is in `paceline.decoder.gguf.architectures`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import CheckpointError
from paceline.decoder.gguf.architectures import Architecture, architecture
from paceline.decoder.gguf.header import GgufHeader
from paceline.decoder.gguf.keys import FACTORS, Keys
from paceline.decoder.models.blueprint import Names

_IGNORED = re.compile(r"blk\.\d+\.attn_rot_embd\.weight|blk\.\d+\.nextn\..+|" + "|".join(map(re.escape, FACTORS)))
"""Tensors without a place in a checkpoint: frequencies that the metadata determine, and what `config` has read."""

_OUTER = {
    "embedding": "token_embd", "positions": "position_embd", "embedding norm": "token_embd_norm",
    "norm": "output_norm", "head": "output",
    "inputs": "per_layer_token_embd", "input projection": "per_layer_model_proj", "input norm": "per_layer_proj_norm",
    "stream": "altup_proj", "unstream": "altup_unembd_proj",
}  # fmt: skip
_INNER = {
    "norm": "attn_norm", "mlp norm": "ffn_norm", "post norm": "post_attention_norm", "post mlp norm": "post_ffw_norm",
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "qkv": "attn_qkv", "out": "attn_output",
    "q norm": "attn_q_norm", "k norm": "attn_k_norm", "gate": "ffn_gate", "up": "ffn_up", "gate up": "ffn_up",
    "down": "ffn_down", "router": "ffn_gate_inp", "shared router": "ffn_gate_inp_shexp",
    "router bias": "exp_probs_b", "sinks": "attn_sinks",
    "dense gate": "ffn_gate", "dense up": "ffn_up", "dense down": "ffn_down",
    "shared gate": "ffn_gate_shexp", "shared up": "ffn_up_shexp", "shared down": "ffn_down_shexp",
    "q a": "attn_q_a", "q a norm": "attn_q_a_norm", "q b": "attn_q_b",
    "kv a": "attn_kv_a_mqa", "kv a norm": "attn_kv_a_norm", "kv b": "attn_kv_b",
    "layer factor": "layer_output_scale", "input gate": "inp_gate", "input out": "proj", "input norm": "post_norm",
    "router scale": "ffn_gate_inp.scale", "expert scale": "ffn_down_exps.scale",
    "expert gate": "ffn_gate", "expert up": "ffn_up", "expert down": "ffn_down",
    "expert norm": "pre_ffw_norm_2", "expert post norm": "post_ffw_norm_2", "expert mlp norm": "post_ffw_norm_1",
    "low in": "laurel_l", "low out": "laurel_r", "low norm": "laurel_post_norm",
    "stream norm": "altup_router_norm", "stream router": "altup_router", "stream factors": "altup_correct_scale",
    "predicts": "altup_predict_coef", "corrects": "altup_correct_coef",
}  # fmt: skip
"""llama.cpp's names of the parts of `Names`; those of experts end with "_exps"."""
_WHOLE = frozenset({"router bias", "sinks", "layer factor", "router scale", "expert scale", "stream factors"})
"""Parts whose names in a checkpoint are whole, without an ending."""
_WRITTEN = {"alpha p": "xielu.alpha_p", "alpha n": "xielu.alpha_n"}
"""Parts that are numbers of a file's metadata, one for each layer."""

_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias|scale)")

RowOrder = Callable[[NDArray[Any]], NDArray[Any]]
"""Maps row numbers of a tensor in Hugging Face's order to row numbers in the file, [n] -> [n]."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of a checkpoint as rows of one in the file; of a tensor of experts, all rows one below the other.

    first, rows  of the stored tensor, or numbers of one with one dimension
    order        of its rows; None: as in a checkpoint
    transposed   a checkpoint has it as [in, out]
    shift        a checkpoint has numbers smaller by this
    single       a vector that a checkpoint has as the only row of a matrix
    vector       the other way round
    keys         the other tensor [heads, in, rows] of latent attention: of each head, its transpose comes before the
                 rows of this one
    number       not of a tensor
    """

    stored: str
    first: int
    rows: int
    order: RowOrder | None = None
    transposed: bool = False
    shift: float = 0.0
    single: bool = False
    vector: bool = False
    keys: str = ""
    number: float | None = None


def pieces(header: GgufHeader) -> dict[str, Piece]:
    """Every tensor of the file by its name in a checkpoint; one that is not known keeps its own."""
    row = architecture(header)
    keys, family = Keys(header, header.fields.text("general.architecture")), row.family_row()
    outer = {_OUTER[part]: (part, name) for part, name in family.names.outer.items()}
    stems = {**_INNER, **row.stems}
    inner = {
        stems[part] + ("_exps" if "{e}" in name else ""): (part, name)
        for part, name in family.names.inner.items()
        if part not in _WRITTEN
    }
    made: dict[str, Piece] = {}
    for stored, tensor in header.tensors.items():
        if _IGNORED.fullmatch(stored):
            continue
        stem, _, kind = stored.rpartition(".")
        layer = _LAYER_NAME.fullmatch(stored)
        rows = math.prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.shape[0]
        if layer is not None and stem.endswith(".attn_k_b"):
            continue  # read with attn_v_b
        prefix = "" if layer is None else family.names.layer.format(i=layer[1])
        if layer is None:
            part, name = outer.get(stem, ("", stem))
            cuts = _outer_cuts(part, name, tensor.shape, rows=rows)
        else:
            part = layer[2] if kind != "scale" else f"{layer[2]}.scale"
            cuts = _cuts(part, tensor.shape, rows, inner=inner, keys=keys)
        if not cuts:
            prefix, cuts = "", [("", stem, 0, rows)]
        turned = family.names.transposed and layer is not None and len(tensor.shape) > 1
        for part, name, first, count in cuts:
            label = f"{prefix}{name}" if part in _WHOLE else f"{prefix}{name}.{kind}"
            if label in made:
                raise CheckpointError(
                    f"{header.path}: expected every tensor once, got one under two names; download the file again"
                )
            lifted = kind == "weight" and part.endswith("norm") and family.plan.norm.endswith("plus one")
            order = _order(part, keys, row)
            single = len(tensor.shape) == 1 and (part == "shared router" or (part == "router bias" and row.row_bias))
            vector = len(tensor.shape) == 2 and kind == "bias" and part != "router bias"  # of experts
            shift = 1.0 if lifted else 0.0
            both = stored.replace("attn_v_b", "attn_k_b") if layer and layer[2] == "attn_v_b" else ""
            made[label] = Piece(
                stored, first, count, order, transposed=turned, shift=shift, single=single, vector=vector, keys=both
            )
    return made | _written(header, family.names)


def _written(header: GgufHeader, names: Names) -> dict[str, Piece]:
    made = {}
    for part, key in _WRITTEN.items():
        said = header.metadata.get(key)
        if part in names.inner and isinstance(said, list):
            for layer, number in enumerate(said):
                label = names.layer.format(i=layer) + names.inner[part]
                made[label] = Piece("", 0, 1, number=float(number))
    return made


def _outer_cuts(part: str, name: str, shape: tuple[int, ...], *, rows: int) -> list[tuple[str, str, int, int]]:
    """Pieces of a tensor outside of layers, as `_cuts` has them: one for each stream, or one."""
    count = shape[0] if "{s}" in name and len(shape) > 2 else 1
    return [(part, name.format(s=s), s * (rows // count), rows // count) for s in range(count)]


def _cuts(
    stem: str, shape: tuple[int, ...], rows: int, *, inner: Mapping[str, tuple[str, str]], keys: Keys
) -> list[tuple[str, str, int, int]]:
    """The part, the name, the first row and the number of rows of each tensor in one of a layer's; []: not known."""
    each = rows // shape[0] if len(shape) > 1 else rows
    if stem in inner:
        part, name = inner[stem]
        if not stem.endswith("_exps"):
            return [(part, name, 0, rows)]
        return [(part, name.format(e=e), e * each, each) for e in range(rows // each)]
    if stem == "ffn_gate_up_exps" and {"ffn_gate_exps", "ffn_up_exps"} <= inner.keys() and len(shape) == 3:
        halves = [(*inner[f"ffn_{side}_exps"], place * each // 2) for place, side in enumerate(("gate", "up"))]
        return [
            (part, name.format(e=e), e * each + first, each // 2)
            for e in range(shape[0])
            for part, name, first in halves
        ]
    if stem == "attn_v_b" and "attn_kv_b" in inner and len(shape) == 3:
        width = keys.integer("attention.key_length_mla") - keys.integer("rope.dimension_count")
        return [(*inner["attn_kv_b"], 0, rows + shape[0] * width)]
    if stem == "attn_qkv" and {"attn_q", "attn_k", "attn_v"} <= inner.keys():
        sizes = [heads * keys.head_dim for heads in (keys.heads, keys.key_heads, keys.key_heads)]
        sides = zip("qkv", (0, sizes[0], sizes[0] + sizes[1]), sizes, strict=True)
        if sum(sizes) == rows:
            return [(side, inner[f"attn_{side}"][1], first, size) for side, first, size in sides]
    return []


def _order(part: str, keys: Keys, row: Architecture) -> RowOrder | None:
    """The order in which the converter has written the rows of a part.

    Where the family rotates dimension i of a head together with i + D / 2, and llama.cpp adjacent ones, rows of queries
    and keys are (head, i, half) instead of (head, half, i). Where a checkpoint has query, key and value head by head,
    a file has all queries, all keys and all values.
    """
    plan, dim, heads = row.family_row().plan, keys.head_dim, keys.heads

    def interleaved(rows: NDArray[Any]) -> NDArray[Any]:
        head, inner = np.divmod(rows, dim)
        half, index = np.divmod(inner, dim // 2)
        stored: NDArray[Any] = head * dim + 2 * index + half
        return stored

    def by_side(rows: NDArray[Any]) -> NDArray[Any]:
        head, inner = np.divmod(rows, 3 * dim)
        side, index = np.divmod(inner, dim)
        stored: NDArray[Any] = (side * heads + head) * dim + index
        return stored

    if part in ("q", "k") and row.neighbours and not plan.neighbours:
        return interleaved
    return by_side if part == "qkv" and plan.joined == "heads" else None
