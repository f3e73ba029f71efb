"""What a decoder-only transformer may be built like: the choices that families differ in, and its tensors by name.

A family that is described by a `Blueprint` and by the `Names` of its tensors has no network of its own
(`paceline.decoder.models.assembled`). Not here: reading config.json, and the computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.decoder.models.config import ModelConfig, RopeConfig
from paceline.decoder.parallel.sharding import Split, TensorSpec

Norm = Literal["rms", "rms plus one", "layer"]
Activation = Literal["silu", "gelu", "gelu tanh", "relu"]
Joined = Literal["", "rows", "heads"]
"""How a checkpoint keeps query, key and value: apart, below each other, or head by head (q, k, v of each head)."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's MLP is several gated ones, of which each token takes some.

    count      how many there are
    chosen     how many a token takes: those of the largest router probabilities, the lowest numbers among equals
    normalise  whether the chosen probabilities are divided by their sum
    """

    count: int
    chosen: int
    normalise: bool


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The choices. Those that are not given are Llama's.

    norm             "rms plus one": the weight is added to 1 (Gemma); "layer": with mean and bias
    activation       of the MLP; "gelu tanh" is the approximation by a hyperbolic tangent
    gated            whether the MLP multiplies activation(gate) with a second product
    experts          a mixture of experts in place of one MLP
    parallel         attention and MLP read the same stream and are added together
    shared_norm      with ``parallel``: both read it through one norm
    post_norms       a norm behind attention and MLP too, before each is added (Gemma 2)
    head_norms       query and key heads pass a norm before they are rotated (Qwen3)
    joined           how query, key and value are kept in a checkpoint
    rotated          leading dimensions of a head that rotary embeddings turn; 0: none
    neighbours       rotary pairs are dimensions 2i and 2i + 1 (GPT-J), not i and i + half
    local_rope       of layers with a sliding window, where it is another one (Gemma 3)
    windows          of each layer: how many positions a token sees, its own included; 0: all
    score_cap        soft cap of attention scores; 0: none
    logit_cap        soft cap of logits; 0: none
    query_scale      scores are q k times this; 0: one by the root of the head's width
    embedding_scale  what embeddings are multiplied with
    learned          rows of a table of learned positions; 0: there is none
    learned_from     the row of position 0
    alibi            scores fall linearly with distance
    embedding_norm   a norm behind the embedding (BLOOM)
    qkv_bias, out_bias, mlp_bias, head_bias   which products have a bias
    """

    norm: Norm = "rms"
    activation: Activation = "silu"
    gated: bool = True
    experts: Experts | None = None
    parallel: bool = False
    shared_norm: bool = False
    post_norms: bool = False
    head_norms: bool = False
    joined: Joined = ""
    rotated: int = 0
    neighbours: bool = False
    local_rope: RopeConfig | None = None
    windows: tuple[int, ...] = ()
    score_cap: float = 0.0
    logit_cap: float = 0.0
    query_scale: float = 0.0
    embedding_scale: float = 1.0
    learned: int = 0
    learned_from: int = 0
    alibi: bool = False
    embedding_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledConfig(ModelConfig):
    """A `ModelConfig` with its blueprint."""

    blueprint: Blueprint = field(default_factory=Blueprint)


@dataclass(frozen=True, slots=True)
class Names:
    """What a checkpoint calls the parts, without ".weight" and ".bias".

    outer       "embedding", "norm", "head" and, where there are any, "positions" and "embedding norm"
    layer       the prefix of layer {i}
    inner       "norm", "mlp norm", "post norm", "post mlp norm", "q", "k", "v" or "qkv", "out", "q norm", "k norm",
                "gate", "up" (or "gate up", both below each other), "down", "router"; those of experts with {e}
    transposed  products are stored as [in, out] (GPT-2)
    """

    outer: Mapping[str, str]
    layer: str
    inner: Mapping[str, str]
    transposed: bool = False


LLAMA_NAMES = Names(
    {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    "model.layers.{i}.",
    {
        "norm": "input_layernorm",
        "mlp norm": "post_attention_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "out": "self_attn.o_proj",
        "q norm": "self_attn.q_norm",
        "k norm": "self_attn.k_norm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
)


def tensors(config: AssembledConfig, names: Names) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint, in the order of their use."""
    plan, outer = config.blueprint, names.outer
    vocabulary, hidden = config.vocab_size, config.hidden_size
    tied = config.tie_word_embeddings
    copies = (f"{outer['head']}.weight",) if tied else ()
    specs = {f"{outer['embedding']}.weight": TensorSpec((vocabulary, hidden), Split.VOCABULARY, copies)}
    if plan.learned:
        specs[f"{outer['positions']}.weight"] = TensorSpec((plan.learned, hidden))
    if plan.embedding_norm:
        specs |= _norm(outer["embedding norm"], hidden, plan)
    for index in range(config.num_layers):
        prefix = names.layer.format(i=index)
        inner = {part: prefix + name for part, name in names.inner.items()}
        specs |= _norm(inner["norm"], hidden, plan)
        specs |= _attention(config, inner, transposed=names.transposed)
        if plan.post_norms:
            specs |= _norm(inner["post norm"], hidden, plan)
        if not plan.shared_norm:
            specs |= _norm(inner["mlp norm"], hidden, plan)
        specs |= _mlp(config, inner, transposed=names.transposed)
        if plan.post_norms:
            specs |= _norm(inner["post mlp norm"], hidden, plan)
    specs |= _norm(outer["norm"], hidden, plan)
    if not tied:
        specs[f"{outer['head']}.weight"] = TensorSpec((vocabulary, hidden), Split.VOCABULARY)
    if plan.head_bias:
        specs[f"{outer['head']}.bias"] = TensorSpec((vocabulary,), Split.VOCABULARY)
    return specs


def _attention(config: AssembledConfig, inner: dict[str, str], *, transposed: bool) -> dict[str, TensorSpec]:
    plan, hidden = config.blueprint, config.hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = ((queries, Split.QUERY_ROWS), (keys, Split.KEY_ROWS), (keys, Split.KEY_ROWS))
    specs: dict[str, TensorSpec] = {}
    if plan.joined:
        blocks = parts if plan.joined == "rows" else ()
        spec = TensorSpec((queries + 2 * keys, hidden), Split.QUERY_ROWS, blocks=blocks)
        specs |= _product(inner["qkv"], spec, bias=plan.qkv_bias, transposed=transposed)
    else:
        for part, (rows, split) in zip("qkv", parts, strict=True):
            specs |= _product(inner[part], TensorSpec((rows, hidden), split), bias=plan.qkv_bias, transposed=transposed)
    if plan.head_norms:
        specs |= {f"{inner[part]}.weight": TensorSpec((config.head_dim,)) for part in ("q norm", "k norm")}
    spec = TensorSpec((hidden, queries), Split.QUERY_COLUMNS)
    return specs | _product(inner["out"], spec, bias=plan.out_bias, transposed=transposed)


def _mlp(config: AssembledConfig, inner: dict[str, str], *, transposed: bool) -> dict[str, TensorSpec]:
    plan, hidden, size = config.blueprint, config.hidden_size, config.intermediate_size
    specs: dict[str, TensorSpec] = {}
    if plan.experts is not None:
        specs[f"{inner['router']}.weight"] = TensorSpec((plan.experts.count, hidden))
    up, down = TensorSpec((size, hidden), Split.ROWS), TensorSpec((hidden, size), Split.COLUMNS)
    both = TensorSpec((2 * size, hidden), Split.ROWS, blocks=((size, Split.ROWS), (size, Split.ROWS)))
    for expert in range(1 if plan.experts is None else plan.experts.count):
        for part, spec in (("gate up", both), ("gate", up), ("up", up), ("down", down)):
            if part in inner:
                name = inner[part].format(e=expert)
                specs |= _product(name, spec, bias=plan.mlp_bias, transposed=transposed)
    return specs


def _norm(name: str, size: int, plan: Blueprint) -> dict[str, TensorSpec]:
    kinds = ("weight", "bias") if plan.norm == "layer" else ("weight",)
    return {f"{name}.{kind}": TensorSpec((size,)) for kind in kinds}


def _product(name: str, spec: TensorSpec, *, bias: bool, transposed: bool) -> dict[str, TensorSpec]:
    """A linear layer. A bias is divided like the rows of its weight, and added once after a sum over the ranks."""
    shape = spec.shape[::-1] if transposed else spec.shape
    specs = {f"{name}.weight": TensorSpec(shape, spec.split, blocks=spec.blocks, transposed=transposed)}
    if bias:
        split = Split.WHOLE if spec.split.summed else spec.split
        specs[f"{name}.bias"] = TensorSpec(spec.shape[:1], split, blocks=spec.blocks)
    return specs
