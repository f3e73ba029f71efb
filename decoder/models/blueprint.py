"""Structure of a decoder-only transformer: the choices that families differ in, and the names of their tensors.

Data alone. What a family's config.json means is in `paceline.decoder.models.family`, the families themselves in
`paceline.decoder.models.registry`, and the computation in `paceline.decoder.models.network`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Norm = Literal["rms", "rms plus one", "layer"]
Activation = Literal["silu", "gelu", "gelu tanh", "relu", "relu squared"]
Joined = Literal["", "rows", "heads"]
"""How a checkpoint keeps query, key and value: apart, below each other, or head by head (q, k, v of each head)."""
Norms = Literal["before", "after", "both"]
HeadNorms = Literal["", "head", "own", "whole"]


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's MLP is several gated ones, of which each token takes some.

    count      how many there are
    chosen     how many a token takes: those of the largest router probabilities, the lowest numbers among equals
    normalise  whether the chosen probabilities are divided by their sum
    shared     the width of one more expert, which every token takes by the share that a router of its own gives it;
               0: there is none
    """

    count: int
    chosen: int
    normalise: bool
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The choices. Those that are not given are Llama's.

    norm             "rms plus one": the weight is added to 1 (Gemma); "layer": with mean and bias
    norm_bias        whether a norm of the kind "layer" has a bias (Cohere's has none)
    norms            where they are: before attention and MLP, after them and before each is added (OLMo 2), or both
    activation       of the MLP; "gelu tanh" is the approximation by a hyperbolic tangent
    gated            whether the MLP multiplies activation(gate) with a second product
    experts          a mixture of experts in place of one MLP
    parallel         attention and MLP read the same stream and are added together
    shared_norm      with ``parallel``: both read it through one norm
    head_norms       queries and keys pass a norm before they are rotated: each "head" with the same weights (Qwen3) or
                     its "own" (Cohere), or the "whole" width in one (OLMo 2)
    joined           how query, key and value are kept in a checkpoint
    turned           the share of a head's dimensions, from the first on, that rotary embeddings turn; 0: none
    unturned         of each layer: whether its queries and keys are not rotated (SmolLM3); (): all are
    neighbours       rotary pairs are dimensions 2i and 2i + 1 (GPT-J), not i and i + half
    local_rope       layers with a sliding window have rope settings of their own (Gemma 3)
    windows          of each layer: how many positions a token sees, its own included; 0: all
    score_cap        soft cap of attention scores; 0: none
    logit_cap        soft cap of logits; 0: none
    query_scale      scores are q k times this; 0: one by the root of the head's width
    embedding_scale, residual_scale, logit_scale   what embeddings, what attention and MLP each add, and logits are
                     multiplied with (Granite)
    learned          rows of a table of learned positions; 0: there is none
    learned_from     the row of position 0
    alibi            scores fall linearly with distance
    embedding_norm   a norm behind the embedding (BLOOM)
    qkv_bias, out_bias, mlp_bias, head_bias   which products have a bias
    """

    norm: Norm = "rms"
    norm_bias: bool = True
    norms: Norms = "before"
    activation: Activation = "silu"
    gated: bool = True
    experts: Experts | None = None
    parallel: bool = False
    shared_norm: bool = False
    head_norms: HeadNorms = ""
    joined: Joined = ""
    turned: float = 1.0
    unturned: tuple[bool, ...] = ()
    neighbours: bool = False
    local_rope: bool = False
    windows: tuple[int, ...] = ()
    score_cap: float = 0.0
    logit_cap: float = 0.0
    query_scale: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    learned: int = 0
    learned_from: int = 0
    alibi: bool = False
    embedding_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a checkpoint's modules, without ".weight" and ".bias".

    outer       "embedding", "norm", "head" and, where there are any, "positions" and "embedding norm"
    layer       the prefix of layer {i}
    inner       "norm", "mlp norm", "post norm", "post mlp norm", "q", "k", "v" or "qkv", "out", "q norm", "k norm",
                "gate", "up" (or "gate up", both below each other), "down"; of experts, with {e}, the last three, and
                "router"; of the one that all tokens take, the same with "shared" before
    transposed  products are stored as [in, out] (GPT-2)
    """

    outer: Mapping[str, str]
    layer: str
    inner: Mapping[str, str]
    transposed: bool = False

    def but(self, **inner: str) -> Names:
        """The same with other names in a layer; "_" stands for a space, and "" for a part that there is not."""
        changed = {**self.inner, **{part.replace("_", " "): name for part, name in inner.items()}}
        named = {part: name for part, name in changed.items() if name}
        return Names(self.outer, self.layer, named, self.transposed)


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
