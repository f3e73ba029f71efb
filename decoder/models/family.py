"""A model family as a row of data: its network, the keys of its config.json, and its tensors. Needs no PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.core.errors import CheckpointError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import LLAMA_NAMES, Activation, Blueprint, Experts, Names
from paceline.decoder.parallel.sharding import Shard, Split, TensorSpec

if TYPE_CHECKING:
    from paceline.decoder.kernels.protocol import Kernels
    from paceline.decoder.models.config import ModelConfig
    from paceline.decoder.models.layers import Weights
    from paceline.decoder.models.network import DecoderModel
    from paceline.decoder.parallel.collectives import Collectives

# ---- fields read from config.json

_EXPERTS = Experts(0, 0, normalise=False)

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu tanh",
    "gelu_fast": "gelu tanh",
    "gelu_pytorch_tanh": "gelu tanh",
    "relu": "relu",
    "relu2": "relu squared",
}


@dataclass(frozen=True, slots=True)
class Key:
    """A field of a blueprint: the keys that it reads in addition to those of every family, and what makes its value."""

    names: tuple[str, ...]
    value: Callable[[Fields], Any]


def flag(name: str, default: bool = False) -> Key:
    """True or false."""
    return Key((name,), lambda config: config.flag(name, default))


def number(name: str, default: float | None = None, of: Callable[[float], float] = float) -> Key:
    """A number above zero, or what is made of one; 0 for null, which says that there is none."""

    def value(config: Fields) -> float:
        return 0.0 if config.values.get(name, default) is None else of(config.number(name, default))

    return Key((name,), value)


def activation(name: str = "hidden_act", default: str = "silu") -> Key:
    """The activation that a key names."""

    def value(config: Fields) -> str:
        said = config.text(name, default)
        if said not in _ACTIVATIONS:
            raise UnknownArchitectureError(
                f"{config.where}: {name}: expected one of {', '.join(_ACTIVATIONS)}, got {said!r}; use a supported "
                "model"
            )
        return _ACTIVATIONS[said]

    return Key(() if name == "hidden_act" else (name,), value)


def only_activation(said: str, made: Activation) -> Key:
    """The one activation of a family, by what ``hidden_act`` says."""

    def value(config: Fields) -> str:
        if config.text("hidden_act", said) != said:
            raise UnknownArchitectureError(
                f"{config.where}: hidden_act: expected {said!r}, got {config.values['hidden_act']!r}, which is not "
                "supported; use another model"
            )
        return made

    return Key((), value)


def share_rotated(default: float = 1.0) -> Key:
    """Return the rotated share of a head: ``partial_rotary_factor``, of the file or of its rope settings."""

    def value(config: Fields) -> float:
        for fields in (config.child("rope_parameters"), config.child("rope_scaling"), config):
            if fields is not None and fields.values.get("partial_rotary_factor") is not None:
                return fields.number("partial_rotary_factor")
        return default

    return Key((), value)


def windows(
    slides: Callable[[Fields, int], bool] = lambda *_: True, *, names: tuple[str, ...] = (), when: str = ""
) -> Key:
    """Return the window of each layer, 0 for none. ``layer_types`` lists the sliding ones; if it is missing, ``slides``
    decides by the file, of which it reads ``names``, and the layer's number. With ``when``, none slide unless that key
    is true.
    """

    def value(config: Fields) -> tuple[int, ...]:
        if when and not config.flag(when, False):
            return ()
        sliding = kinds_of_layers(config, slides)
        if config.values.get("sliding_window") is None or not any(sliding):
            return ()
        return tuple(config.integer("sliding_window") if one else 0 for one in sliding)

    return Key(("layer_types", "sliding_window", *names, *((when,) if when else ())), value)


def kinds_of_layers(config: Fields, slides: Callable[[Fields, int], bool]) -> tuple[bool, ...]:
    """Return for each layer whether its window slides, by ``layer_types`` or, if that is missing, by ``slides``."""
    count, kinds = config.integer("num_hidden_layers"), config.values.get("layer_types")
    if kinds is None:
        return tuple(slides(config, layer) for layer in range(count))
    if not isinstance(kinds, list) or len(kinds) != count:
        raise CheckpointError(
            f"{config.where}: layer_types: expected a list of {count} layer types, got another value; correct the file"
        )
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise UnknownArchitectureError(f"{config.where}: layer_types: {kind!r} is not supported; use another model")
    return tuple(kind == "sliding_attention" for kind in kinds)


def unturned_layers(config: Fields) -> tuple[bool, ...]:
    """Return for each layer whether it has no rotation."""
    count, given = config.integer("num_hidden_layers"), config.values.get("no_rope_layers")
    if given in (None, []):
        interval = config.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval == 0 for layer in range(count))
    if not isinstance(given, list) or len(given) != count or not set(given) <= {0, 1}:
        raise CheckpointError(
            f"{config.where}: no_rope_layers: expected a list of {count} zeros and ones, got another value; correct "
            "the file"
        )
    return tuple(not turns for turns in given)


def parts_of(pattern: str, parts: str = "qkv") -> dict[str, str]:
    """Names of parts that differ in one letter."""
    return {part: pattern.format(part) for part in parts}


def other_rope(change: Callable[[Fields, Fields], Mapping[str, object]]) -> Callable[[Fields], Mapping[str, object]]:
    """Keys made of a file and its rope settings, which "rope" replaces; the settings that count are the last ones."""

    def more(config: Fields) -> Mapping[str, object]:
        made: dict[str, object] = {}
        for key in ("rope_parameters", "rope_scaling"):
            if (rope := config.child(key)) is not None and (changed := dict(change(config, rope))):
                made |= {key: changed.pop("rope"), **changed}
        return made

    return more


def experts(
    name: str,
    *,
    count: int | None = None,
    chosen: int | None = None,
    normalise: bool | None = None,
    shared: str = "",
    plan: Experts = _EXPERTS,
) -> Key:
    """An MoE: the key of the number of experts, and defaults of absent keys; ``normalise`` None: read from a key."""

    def value(config: Fields) -> Experts:
        return replace(
            plan,
            count=config.integer(name, count),
            chosen=config.integer("num_experts_per_tok", chosen),
            normalise=config.flag("norm_topk_prob", False) if normalise is None else normalise,
            shared=config.integer(shared) if shared else 0,
        )

    asked = (name, "num_experts_per_tok", *(("norm_topk_prob",) if normalise is None else ()))
    return Key((*asked, *((shared,) if shared else ())), value)


ACTIVATION = {"activation": activation()}
BIASES = {"qkv_bias": flag("attention_bias"), "out_bias": flag("attention_bias")}

# ---- a row of the table


@dataclass(frozen=True, slots=True)
class Fused:
    """A tensor of a layer that holds several of `Names`: rows of parts in turns, or experts [E, rows, columns].

    It may be a matrix, a bias [rows] or [E, rows], or MXFP4's blocks and scales.

    name     without its ending, after the prefix of the layer
    parts    the rows of each part, which repeat until the end of the tensor
    transposed   matrices are [E, columns, rows]
    """

    name: str
    parts: Callable[[ModelConfig], Mapping[str, int]]
    transposed: bool = False


def gate_up(config: ModelConfig) -> dict[str, int]:
    """Rows of `Fused` experts that have all of "gate" before all of "up"."""
    mixture = config.blueprint.experts
    width = config.intermediate_size if mixture is None else mixture.width or config.intermediate_size
    return {"gate": width, "up": width}


def rows_of(part: str) -> Callable[[ModelConfig], dict[str, int]]:
    return lambda _: {part: 1}


_HEADS = re.compile(r"medusa_head(s?\.|_)\d+\..+")
_NULLABLE = ("sliding_window", "_token_id", "q_lora_rank")
"""Suffixes of keys whose null means none instead of the default."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model family. A family with another kind of network or tensors derives from it and overrides `tensors`,
    `build`.

    name         the ``model_type`` of config.json
    summary      one line for tables
    names        names of the parts in its checkpoints
    plan         the options that all of its models share
    reads        options that config.json determines, by the field of `Blueprint`
    defaults     values of absent keys, as in transformers; a function computes one from the rest of the file. Sizes
                 have none
    renamed      keys of the file that have other names in other families
    neutral      keys whose other values would change the computation, with the neutral value, or a function of the file
                 that returns it
    more         other keys, made of the translated file
    fused        tensors of a layer that hold several parts, or all experts
    nested       the keys that are known inside of an object
    bare_prefix  prefix of names that is missing in checkpoints of the network without its head
    mtp          whether MTP layers for it draft (`paceline.draft.mtp`)
    ignored      a pattern of tensors in a checkpoint that have no effect; a group "layer" in it must be the number of a
                 layer that the network does not have, as MTP layers have (`paceline.draft.mtp` reads them)
    """

    name: str
    summary: str
    names: Names = LLAMA_NAMES
    plan: Blueprint = field(default_factory=Blueprint)
    reads: Mapping[str, Key] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, object] = field(default_factory=dict)
    more: Callable[[Fields], Mapping[str, object]] = lambda _: {}
    fused: tuple[Fused, ...] = ()
    nested: Mapping[str, frozenset[str]] = field(default_factory=dict)
    bare_prefix: str = "model."
    mtp: bool = False
    ignored: str = ""

    @property
    def keys(self) -> frozenset[str]:
        """Keys of config.json that it reads, in addition to those of every family."""
        return frozenset(name for key in self.reads.values() for name in key.names).union(self.renamed, self.neutral)

    def translated(self, config: Fields) -> Fields:
        """Return the file with the keys that most families use, and with defaults for absent keys; a special token that
        is null in the file stays none, and a default outside a small vocabulary is not used.
        """
        values = {key: one for key, one in config.values.items() if key not in self.renamed}
        for old, new in self.renamed.items():
            if old in config.values and (config.values[old] is not None or new not in values):
                values[new] = config.values[old]
        for key, default in self.defaults.items():
            if key in values and (values[key] is not None or key.endswith(_NULLABLE)):
                continue
            value = default(Fields(values, config.where)) if callable(default) else default
            if key.endswith("_token_id"):
                ids = value if isinstance(value, list) else [value]
                size = config.integer("vocab_size")
                value = value if all(isinstance(one, int) and one < size for one in ids) else None
            values[key] = value
        values |= self.more(Fields(values, config.where))
        return Fields(values, config.where)

    def blueprint(self, config: Fields) -> Blueprint:
        return replace(self.plan, **{name: key.value(config) for name, key in self.reads.items()})

    def layer_sizes(self, config: Fields) -> tuple[tuple[int, int], ...]:
        """Return the width of a head and the number of K/V heads of each layer, if they differ."""
        if config.values.get("per_layer_config"):
            raise UnknownArchitectureError(
                f"{config.where}: per_layer_config gives layers different sizes, which is not supported; use a "
                "checkpoint whose layers have equal sizes"
            )
        return ()

    def ignores(self, name: str, config: ModelConfig) -> bool:
        """Whether a tensor of that name in a checkpoint has no effect, as draft heads by Medusa's names."""
        found = re.fullmatch(self.ignored, name) if self.ignored else None
        first = config.num_layers
        return bool(_HEADS.fullmatch(name) or (found and int(found.groupdict().get("layer", first)) >= first))

    def tensors(self, config: ModelConfig) -> dict[str, TensorSpec]:
        """Every tensor of a checkpoint by its name, in the order of their use."""
        plan, outer, hidden = config.blueprint, self.names.outer, config.hidden_size
        tied, head = config.tie_word_embeddings, f"{self.names.outer['head']}.weight"
        table = TensorSpec((config.vocab_size, hidden), Split.VOCABULARY)
        specs = {f"{outer['embedding']}.weight": replace(table, copies=(head,) if tied else ())}
        if plan.learned:
            specs[f"{outer['positions']}.weight"] = TensorSpec((plan.learned, hidden))
        if plan.embedding_norm:
            specs |= _norm(outer.get("embedding norm", ""), hidden, plan)
        for index in range(config.num_layers):
            dense = plan.experts is not None and bool(plan.experts.dense) and plan.experts.dense[index]
            specs |= self.layer_tensors(config, self.names.layer.format(i=index), index=index, dense=dense)
        specs |= _norm(outer["norm"], hidden, plan)
        if not tied:
            specs[head] = table
        if plan.head_bias:
            specs[f"{outer['head']}.bias"] = TensorSpec((config.vocab_size,), Split.VOCABULARY)
        return specs

    def build(
        self, shard: Shard, weights: Weights, kernels: Kernels, *, positions: int, group: Collectives
    ) -> DecoderModel:
        """Build the network of a rank, whose tensors it takes out of ``weights``."""
        from paceline.decoder.models.layers import Part
        from paceline.decoder.models.network import DecoderModel

        return DecoderModel(Part(shard, kernels, group, self.names), weights, positions)

    def layer_tensors(
        self, config: ModelConfig, prefix: str, *, index: int = 0, dense: bool = False
    ) -> dict[str, TensorSpec]:
        """Every tensor of layer ``index``, by its name. ``dense``: it has one MLP in place of experts."""
        plan, hidden, transposed = config.blueprint, config.hidden_size, self.names.transposed
        inner = {part: prefix + name for part, name in self.names.inner.items()}
        specs = _latent(config, inner) if plan.latent else attention_tensors(config, inner, transposed=transposed)
        if plan.norms != "after":
            specs = _norm(inner["norm"], hidden, plan) | specs
        if plan.norms != "before":
            specs |= _norm(inner["post norm"], hidden, plan)
        if plan.norms != "after" and not plan.shared_norm:
            specs |= _norm(inner["mlp norm"], hidden, plan)
        mixture = plan.experts
        if mixture is None or dense:
            one = inner if mixture is None else parts(inner, "dense")
            specs |= mlp_tensors(config.intermediate_size, config, one, transposed=transposed)
        else:
            specs[f"{inner['router']}.weight"] = TensorSpec((mixture.count, hidden))
            if mixture.router_bias:
                specs[f"{inner['router']}.bias"] = TensorSpec((mixture.count,))
            if mixture.corrected:
                sizes = (mixture.count,) if mixture.corrected == "vector" else (1, mixture.count)
                specs[inner["router bias"]] = TensorSpec(sizes, exact=True)
            for expert in range(mixture.count):
                one = {part: name.format(e=expert) for part, name in inner.items()}
                specs |= mlp_tensors(mixture.width or config.intermediate_size, config, one, transposed=transposed)
            if mixture.shared:
                if mixture.shared_weighted:
                    specs[f"{inner['shared router']}.weight"] = TensorSpec((1, hidden))
                specs |= mlp_tensors(mixture.shared, config, parts(inner, "shared"), transposed=transposed)
        if plan.norms != "before":
            specs |= _norm(inner["post mlp norm"], hidden, plan)
        return specs


def parts(inner: Mapping[str, str], kind: str) -> dict[str, str]:
    """The names of an MLP's parts: of the "shared" expert, or in a "dense" layer of a model with experts."""
    return {part.removeprefix(f"{kind} "): name for part, name in inner.items() if part.startswith(f"{kind} ")}


def attention_tensors(
    config: ModelConfig, inner: Mapping[str, str], *, transposed: bool = False, sides: str = "qkv"
) -> dict[str, TensorSpec]:
    """Every tensor of attention. ``sides``: the products that a layer has."""
    plan, hidden, width = config.blueprint, config.hidden_size, config.head_dim
    queries, keys = config.num_heads * width, config.num_kv_heads * width
    parts = ((queries, Split.QUERY_ROWS), (keys, Split.KEY_ROWS), (keys, Split.KEY_ROWS))
    specs: dict[str, TensorSpec] = {}
    if plan.joined:
        blocks = parts if plan.joined == "rows" else ()
        spec = TensorSpec((queries + 2 * keys, hidden), Split.QUERY_ROWS, blocks=blocks)
        specs |= _product(inner["qkv"], spec, bias=plan.qkv_bias, transposed=transposed)
    else:
        for part, (rows, split) in zip("qkv", parts, strict=True):
            if part in sides:
                spec = TensorSpec((rows, hidden), split, key_heads=config.num_kv_heads)
                specs |= _product(inner[part], spec, bias=plan.qkv_bias, transposed=transposed)
    for part, heads in (("q norm", config.num_heads), ("k norm", config.num_kv_heads)):
        if part[0] not in sides:
            continue
        sizes = {"": (), "head": (width,), "own": (heads, width), "whole": (heads * width,), "bare": ()}[
            plan.head_norms
        ]
        if sizes and plan.norm_weight:
            specs |= {f"{inner[part]}.{kind}": TensorSpec(sizes) for kind in _norm_kinds(plan)}
    if plan.sinks:
        specs[inner["sinks"]] = TensorSpec((config.num_heads,), exact=True)
    spec = TensorSpec((hidden, queries), Split.QUERY_COLUMNS, key_heads=config.num_kv_heads)
    return specs | _product(inner["out"], spec, bias=plan.out_bias, transposed=transposed)


def _latent(config: ModelConfig, inner: Mapping[str, str]) -> dict[str, TensorSpec]:
    latent, hidden, heads = config.blueprint.latent, config.hidden_size, config.num_heads
    assert latent is not None
    width = latent.nope + latent.rope
    specs: dict[str, TensorSpec] = {}
    if latent.query:
        specs[f"{inner['q a']}.weight"] = TensorSpec((latent.query, hidden))
        specs[f"{inner['q a norm']}.weight"] = TensorSpec((latent.query,))
    queries = inner["q b" if latent.query else "q"]
    specs[f"{queries}.weight"] = TensorSpec((heads * width, latent.query or hidden), Split.QUERY_ROWS)
    specs[f"{inner['kv a']}.weight"] = TensorSpec((latent.rank + latent.rope, hidden))
    specs[f"{inner['kv a norm']}.weight"] = TensorSpec((latent.rank,))
    rows = heads * (latent.nope + latent.value)  # there are as many key heads as query heads
    specs[f"{inner['kv b']}.weight"] = TensorSpec((rows, latent.rank), Split.QUERY_ROWS)
    specs[f"{inner['out']}.weight"] = TensorSpec((hidden, heads * latent.value), Split.QUERY_COLUMNS)
    return specs


def mlp_tensors(
    size: int, config: ModelConfig, inner: Mapping[str, str], *, transposed: bool = False
) -> dict[str, TensorSpec]:
    """Every tensor of an MLP of a width."""
    hidden, bias = config.hidden_size, config.blueprint.mlp_bias
    specs: dict[str, TensorSpec] = {}
    if config.blueprint.activation == "xielu":
        specs |= {inner[part]: TensorSpec((1,), exact=True) for part in ("alpha p", "alpha n")}
    up, down = TensorSpec((size, hidden), Split.ROWS), TensorSpec((hidden, size), Split.COLUMNS)
    both = TensorSpec((2 * size, hidden), Split.ROWS, blocks=((size, Split.ROWS), (size, Split.ROWS)))
    for part, spec in (("gate up", both), ("gate", up), ("up", up), ("down", down)):
        if part in inner:
            specs |= _product(inner[part], spec, bias=bias, transposed=transposed)
    return specs


def _norm(name: str, size: int, plan: Blueprint) -> dict[str, TensorSpec]:
    return {f"{name}.{kind}": TensorSpec((size,)) for kind in _norm_kinds(plan)}


def _norm_kinds(plan: Blueprint) -> tuple[str, ...]:
    bias = plan.norm_bias and plan.norm.startswith("layer")
    return (*(("weight",) if plan.norm_weight else ()), *(("bias",) if bias else ()))


def _product(name: str, spec: TensorSpec, *, bias: bool, transposed: bool) -> dict[str, TensorSpec]:
    """A bias is sharded like the rows of its weight, or added once after a sum over the ranks."""
    shape = spec.shape[::-1] if transposed else spec.shape
    specs = {f"{name}.weight": replace(spec, shape=shape, transposed=transposed)}
    if bias:
        split = Split.WHOLE if spec.split.summed else spec.split
        specs[f"{name}.bias"] = TensorSpec(spec.shape[:1], split, blocks=spec.blocks)
    return specs
