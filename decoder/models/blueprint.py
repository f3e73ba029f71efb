"""Structure of a decoder-only transformer: the options in which families differ, and the names of their tensors.

Data only. `paceline.decoder.models.family` reads a family's config.json, `paceline.decoder.models.registry` has the
families, and `paceline.decoder.models.network` the computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Norm = Literal["rms", "rms plus one", "layer", "layer plus one"]
Alibi = Literal["", "bloom", "mpt"]
Activation = Literal["silu", "gelu", "gelu tanh", "relu", "relu squared", "clamped swish", "xielu"]
Joined = Literal["", "rows", "heads"]
"""Layout of query, key and value in a checkpoint: separate, concatenated by rows, or by head (q, k, v of each head)."""
Norms = Literal["before", "after", "both"]
HeadNorms = Literal["", "head", "own", "whole", "bare"]


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts (MoE): a layer has several gated MLPs, of which each token activates some.

    count            number of experts
    chosen           active experts per token: those of the highest scores, the lowest numbers among equals
    normalise        whether the chosen scores are divided by their sum
    shared           width of a shared expert, which every token uses; 0: none
    shared_weighted  whether a separate router weights it (Qwen2)
    width            of an expert; 0: ``intermediate_size`` of the model
    scores           what the router's output is made into; "sparse mixer": the shares of the two best among those
                     within ``slack`` of each, relative to its size (PhiMoE, arXiv 2409.12136)
    weighs_inputs    the chosen one's input is multiplied by its score, and not its output (Llama 4)
    router_bias      whether the router has a bias
    corrected        experts are chosen by score plus a bias of each, which the sum does not see (DeepSeek V3): shape of
                     its tensor, a vector or a "row" [1, count]; "": there is none
    groups, chosen_groups, of_group  experts are chosen from the groups whose ``of_group`` best scores add up to most
    scale            factor of the chosen scores
    dense            for each layer: whether it has one MLP in place of experts; (): none has
    """

    count: int
    chosen: int
    normalise: bool
    shared: int = 0
    shared_weighted: bool = True
    width: int = 0
    scores: Literal["softmax", "sigmoid", "sparse mixer"] = "softmax"
    slack: float = 0.0
    weighs_inputs: bool = False
    router_bias: bool = False
    corrected: Literal["", "vector", "row"] = ""
    groups: int = 1
    chosen_groups: int = 1
    of_group: int = 2
    scale: float = 1.0
    dense: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek V2, arXiv 2405.04434): keys and values are made of a latent vector.

    The cache holds the keys and values of every head: every backend and kernel then serves it.

    query, rank  widths of the latent vectors of queries (0: none), and of keys and values
    nope, rope   dimensions of a head's query and key without rotation, and with it, which all heads' keys share
    value        dimensions of a head's value, at most ``nope + rope``
    """

    query: int
    rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class Gemma:
    """The options of Gemma 3n and 4 that others do not have.

    sources    for each layer: the one whose keys and values it reads, itself where it has its own
    alike      for each layer: whether keys and values are made by one product
    widths     of the MLP of each layer
    inputs     width of the input that each layer has of its own for a token; 0: none has
    rows       of the table of these inputs; other tokens have that of token 0
    streams    number of residual streams (Gemma 3n's AltUp, arXiv 2301.13310), of which layers read the ``active`` one;
               0: one, without what Gemma 3n has beside it
    rank       of the product added to attention (Gemma 3n's LAuReL, arXiv 2411.07501)
    corrected  whether the active stream has learned factors before it meets the layer's input
    sparse     for each layer: deviations from the mean below which its gates are 0; None: it has none
    """

    sources: tuple[int, ...]
    alike: tuple[bool, ...]
    widths: tuple[int, ...]
    inputs: int = 0
    rows: int = 0
    streams: int = 0
    active: int = 0
    rank: int = 0
    corrected: bool = True
    sparse: tuple[float | None, ...] = ()

    def sides(self, layer: int) -> str:
        """The products of a layer: only queries, or keys and values too, with values from "k" where they are alike."""
        return "q" if self.sources[layer] != layer else "qkk" if self.alike[layer] else "qkv"


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Options of a network; the defaults are Llama's.

    norm             "plus one": the weight is added to 1 (Gemma, Nemotron); "layer": with mean and bias
    norm_weight      whether norms have weights (OLMo 1 and nanochat have none)
    norm_bias        whether a norm of the kind "layer" has a bias (Cohere's has none)
    norms            position of norms: before attention and MLP, after them before the addition (OLMo 2), or both
    activation       of the MLP; "gelu tanh" is the approximation by a hyperbolic tangent, "clamped swish" gpt-oss's,
                     "xielu" has two learned numbers in each layer (arXiv 2411.13010)
    gated            whether the MLP multiplies activation(gate) by a second matmul
    experts          a mixture of experts in place of one MLP
    parallel         attention and MLP read the same input and are added together
    shared_norm      with ``parallel``: both read it through one norm
    head_norms       queries and keys are normalised before rotation: each "head" with the same weights (Qwen3) or its
                     "own" (Cohere), or the "whole" width at once (OLMo 2); "bare": each without weights, in layers
                     that rotate (Llama 4)
    late_head_norms  they are normalised after rotation (Hunyuan, nanochat)
    sinks            heads have a score beside those of keys, whose weight goes nowhere (gpt-oss)
    qkv_clip         bound of the size of queries, keys and values (OLMo); 0: none
    latent           multi-head latent attention
    gemma            Gemma 3n's and 4's layers; their values are normalised without weights
    joined           layout of query, key and value in a checkpoint
    rotated_share    the share of a head's first dimensions that rotary embeddings rotate; 0: none
    unrotated        for each layer: whether its queries and keys are not rotated (SmolLM3); (): all are
    neighbours       rotary pairs are dimensions 2i and 2i + 1 (GPT-J), not i and i + half
    backwards        rotary embeddings rotate by the negative angle (nanochat)
    local_rope       layers with a sliding window have separate rope settings (Gemma 3)
    windows          for each layer: number of positions that a token attends to, its own included; 0: all
    chunks           for each layer: positions of a chunk, of which a token attends to its own up to itself; 0: all
    sharper          queries at position p are multiplied by 1 + a log(1 + floor((p + b) / n)), for a, b, n (Llama 4)
    only_unturned_sharper  in layers without rotation alone
    score_cap        soft cap of attention scores; 0: none
    logit_cap        soft cap of logits; 0: none
    query_scale      scores are q k times this; 0: 1 / sqrt(head width)
    embedding_scale, residual_scale, logit_scale   factors of embeddings, of the outputs of attention and MLP, and of
                                                   logits (Granite)
    learned          rows of a table of learned positions; 0: none
    learned_from     the row of position 0
    alibi            scores decrease linearly with distance, by the slopes of BLOOM or of MPT
    embedding_norm   a norm after the embedding (BLOOM)
    qkv_bias, out_bias, mlp_bias, head_bias   which matmuls have a bias
    """

    norm: Norm = "rms"
    norm_weight: bool = True
    norm_bias: bool = True
    norms: Norms = "before"
    activation: Activation = "silu"
    gated: bool = True
    experts: Experts | None = None
    parallel: bool = False
    shared_norm: bool = False
    head_norms: HeadNorms = ""
    late_head_norms: bool = False
    sinks: bool = False
    qkv_clip: float = 0.0
    latent: Latent | None = None
    gemma: Gemma | None = None
    joined: Joined = ""
    rotated_share: float = 1.0
    unrotated: tuple[bool, ...] = ()
    neighbours: bool = False
    backwards: bool = False
    local_rope: bool = False
    windows: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    sharper: tuple[float, int, int] | None = None
    only_unturned_sharper: bool = False
    score_cap: float = 0.0
    logit_cap: float = 0.0
    query_scale: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    learned: int = 0
    learned_from: int = 0
    alibi: Alibi = ""
    embedding_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a checkpoint's modules, without ".weight" and ".bias".

    outer       "embedding", "norm", "head" and, if present, "positions" and "embedding norm", or those of Gemma 3n
                and 4: "inputs", "input projection", "input norm", and "stream" and "unstream" with {s}
    layer       the prefix of layer {i}
    inner       "norm", "mlp norm", "post norm", "post mlp norm", "q", "k", "v" or "qkv", "out", "q norm", "k norm",
                for latent attention "q" or "q a", "q a norm" and "q b", "kv a", "kv a norm" and "kv
                b", "gate", "up" (or "gate up", both concatenated by rows), "down"; for experts, with {e}, the last
                three, "router", and "router bias" and "sinks" with their tensors' whole names; for the shared expert,
                and for the MLP of layers without experts, the same with "shared" or "dense" before; "alpha p" and
                "alpha n" of "xielu"
    transposed  matrices are stored as [in, out] (GPT-2)
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
EXPERT_NAMES = LLAMA_NAMES.but(
    router="mlp.gate",
    gate="mlp.experts.{e}.gate_proj",
    up="mlp.experts.{e}.up_proj",
    down="mlp.experts.{e}.down_proj",
)
"""The same with experts in place of an MLP."""
