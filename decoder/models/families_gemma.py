"""Gemma 1 to 4. Some layers of the last two read the keys and values of others.

Defaults are those of transformers' configuration classes, except that sizes have no default.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import TYPE_CHECKING

from paceline.core.errors import CheckpointError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import LLAMA_NAMES, Blueprint, Experts, Gemma
from paceline.decoder.models.family import (
    BIASES,
    Family,
    Fused,
    Key,
    activation,
    attention_tensors,
    kinds_of_layers,
    mlp_tensors,
    number,
    parts,
    windows,
)
from paceline.decoder.parallel.sharding import Shard, Split, TensorSpec

if TYPE_CHECKING:
    from paceline.decoder.kernels.protocol import Kernels
    from paceline.decoder.models.config import ModelConfig
    from paceline.decoder.models.layers import Weights
    from paceline.decoder.models.network import DecoderModel
    from paceline.decoder.parallel.collectives import Collectives

# ---- Gemma 1 to 3

_GEMMA2 = Family(
    "gemma2",
    "Gemma 2",
    names=LLAMA_NAMES.but(
        post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        post_mlp_norm="post_feedforward_layernorm",
    ),
    plan=Blueprint(norm="rms plus one", norms="both"),
    reads={
        **BIASES,
        "activation": activation("hidden_activation", "gelu_pytorch_tanh"),
        "windows": windows(lambda _, layer: layer % 2 == 0),
        "score_cap": number("attn_logit_softcapping", 50.0),
        "logit_cap": number("final_logit_softcapping", 30.0),
        "query_scale": number("query_pre_attn_scalar", 256.0, lambda width: width**-0.5),
        "embedding_scale": Key((), lambda config: config.integer("hidden_size") ** 0.5),
    },
    defaults={
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
)


def _local(config: Fields, layer: int) -> bool:
    pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
    return (layer + 1) % pattern != 0


_GEMMA3 = replace(
    _GEMMA2,
    name="gemma3_text",
    summary="Gemma 3, text only",
    plan=replace(_GEMMA2.plan, head_norms="head"),
    reads={
        **_GEMMA2.reads,
        "windows": windows(_local, names=("_sliding_window_pattern", "sliding_window_pattern")),
        "score_cap": number("attn_logit_softcapping"),
        "logit_cap": number("final_logit_softcapping"),
        "local_rope": Key(("rope_local_base_freq",), lambda _: True),
    },
    defaults={
        **_GEMMA2.defaults,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
)

_VAULTGEMMA = replace(
    _GEMMA2,
    name="vaultgemma",
    summary="VaultGemma",
    names=LLAMA_NAMES.but(mlp_norm="pre_feedforward_layernorm"),
    plan=Blueprint(norm="rms plus one"),
    defaults={**_GEMMA2.defaults, "pad_token_id": 0},
)

_GEMMA = replace(
    _GEMMA2,
    name="gemma",
    summary="Gemma 1",
    names=LLAMA_NAMES,
    plan=Blueprint(norm="rms plus one"),
    reads={
        **BIASES,
        "activation": activation(default="gelu_pytorch_tanh"),
        "embedding_scale": _GEMMA2.reads["embedding_scale"],
    },
    defaults={key: one for key, one in _GEMMA2.defaults.items() if key != "sliding_window"} | {"pad_token_id": 0},
)

# ---- Gemma 4


def _slides(config: Fields, layer: int) -> bool:
    return (layer + 1) % 6 != 0 and layer + 1 != config.integer("num_hidden_layers")


def _kinds(config: Fields) -> tuple[bool, ...]:
    """Return for each layer whether its window slides; the last one's never does."""
    return (*kinds_of_layers(config, _slides)[:-1], False)


def _layers(config: Fields, kinds: tuple[bool, ...]) -> Gemma:
    shared = config.integer("num_kv_shared_layers", 0, minimum=0)
    first = len(kinds) - shared
    if shared and set(kinds[: max(0, first)]) != set(kinds):
        raise CheckpointError(
            f"{config.where}: num_kv_shared_layers: expected a layer of each kind before the last {shared}, got none; "
            "correct the file"
        )
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    sources = tuple(layer if layer < first else last[kind] for layer, kind in enumerate(kinds))
    alike, wide = config.flag("attention_k_eq_v", False), config.flag("use_double_wide_mlp", False)
    width = config.integer("intermediate_size")
    inputs = config.integer("hidden_size_per_layer_input", 256, minimum=0)
    rows = config.integer("vocab_size_per_layer_input", 262144, minimum=1 if inputs else 0)
    most = config.integer("vocab_size")
    if inputs and rows > most:
        raise UnknownArchitectureError(
            f"{config.where}: vocab_size_per_layer_input: expected at most vocab_size = {most}, got {rows}, which is "
            "not supported; use another model"
        )
    if config.values.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise UnknownArchitectureError(
            f"{config.where}: use_bidirectional_attention: expected null or 'vision', got "
            f"{config.values['use_bidirectional_attention']!r}, which is not supported; use another model"
        )
    return Gemma(
        sources,
        tuple(alike and not slides for slides in kinds),
        tuple(2 * width if wide and layer >= first else width for layer in range(len(kinds))),
        inputs,
        rows if inputs else 0,
    )


def _experts(config: Fields) -> Experts | None:
    if not config.flag("enable_moe_block", False):
        return None
    return Experts(
        config.integer("num_experts"),
        config.integer("top_k_experts"),
        normalise=True,
        width=config.integer("moe_intermediate_size"),
    )


def _of_experts(config: ModelConfig) -> dict[str, int]:
    mixture = config.blueprint.experts
    return {} if mixture is None else {"expert gate": mixture.width, "expert up": mixture.width}


def _told_sizes(config: Fields, said: object, usual: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    names = ("head_dim", "num_key_value_heads")
    numbers = [str(layer) for layer in range(config.integer("num_hidden_layers"))]
    layers: dict[str, object] = said if isinstance(said, dict) and set(said) <= set(numbers) else {"0": None}
    made: list[tuple[int, int]] = []
    for layer in numbers:
        own = layers.get(layer, {})
        if not isinstance(own, dict) or not set(own) <= set(names):
            raise UnknownArchitectureError(
                f"{config.where}: per_layer_config: expected head_dim and num_key_value_heads of layers by their "
                "numbers, got other values, which is not supported; use another model"
            )
        fields = Fields(own, config.where)
        made.append((fields.integer(names[0], usual[0]), fields.integer(names[1], usual[1])))
    told = (config.values.get("global_head_dim"), config.values.get("num_global_key_value_heads"))
    full = [sizes for sizes, slides in zip(made, _kinds(config), strict=True) if not slides]
    if any(one not in (None, size) for sizes in full for one, size in zip(told, sizes, strict=True)):
        raise CheckpointError(
            f"{config.where}: global_head_dim: expected it and num_global_key_value_heads to say what "
            "per_layer_config says, or nothing, got other values; correct the file"
        )
    return tuple(made)


class _Gemma4(Family):
    def layer_sizes(self, config: Fields) -> tuple[tuple[int, int], ...]:
        usual = (config.integer("head_dim"), config.integer("num_key_value_heads"))
        said = config.values.get("per_layer_config")
        if said is None:
            heads = config.integer("num_global_key_value_heads", usual[1])
            heads = heads if config.flag("attention_k_eq_v", False) else usual[1]
            wide = (config.integer("global_head_dim", 512), heads)
            made = tuple(usual if slides else wide for slides in _kinds(config))
        else:
            made = _told_sizes(config, said, usual)
        for width, heads in made:
            if width % 2 or config.integer("num_attention_heads") % heads:
                raise CheckpointError(
                    f"{config.where}: head_dim: expected an even number, and K/V heads that divide the query heads, in "
                    f"every layer, got {width} and {heads}; correct the file"
                )
        return made

    def ignores(self, name: str, config: ModelConfig) -> bool:
        plan = config.blueprint.gemma
        assert plan is not None
        unused = (
            f"{self.names.layer.format(i=layer)}self_attn.{part}"
            for layer, source in enumerate(plan.sources)
            if source != layer
            for part in ("k_proj", "v_proj", "k_norm", "v_norm")
        )
        return name.rpartition(".")[0] in unused or Family.ignores(self, name, config)

    def tensors(self, config: ModelConfig) -> dict[str, TensorSpec]:
        plan, outer, specs = config.blueprint.gemma, self.names.outer, Family.tensors(self, config)
        assert plan is not None
        if plan.inputs:
            every = config.num_layers * plan.inputs
            specs[f"{outer['inputs']}.weight"] = TensorSpec((plan.rows, every), Split.VOCABULARY)
            specs[f"{outer['input projection']}.weight"] = TensorSpec((every, config.hidden_size))
            specs[f"{outer['input norm']}.weight"] = TensorSpec((plan.inputs,))
        return specs

    def layer_tensors(
        self, config: ModelConfig, prefix: str, *, index: int = 0, dense: bool = False
    ) -> dict[str, TensorSpec]:
        plan, hidden, mixture = config.blueprint.gemma, config.hidden_size, config.blueprint.experts
        assert plan is not None
        inner = {part: prefix + name for part, name in self.names.inner.items()}
        specs = {f"{inner[part]}.weight": TensorSpec((hidden,)) for part in _NORMS}
        specs |= attention_tensors(config.of_layer(index), inner, sides=plan.sides(index))
        specs |= mlp_tensors(plan.widths[index], config, inner)
        if "layer factor" in inner:
            specs[inner["layer factor"]] = TensorSpec((1,), exact=True)
        if plan.inputs:
            specs[f"{inner['input gate']}.weight"] = TensorSpec((plan.inputs, hidden))
            specs[f"{inner['input out']}.weight"] = TensorSpec((hidden, plan.inputs))
            specs[f"{inner['input norm']}.weight"] = TensorSpec((hidden,))
        if mixture is not None:
            specs[f"{inner['router']}.weight"] = TensorSpec((mixture.count, hidden))
            specs[inner["router scale"]] = TensorSpec((hidden,))
            specs[inner["expert scale"]] = TensorSpec((mixture.count,), exact=True)
            specs |= {f"{inner[f'expert {part}']}.weight": TensorSpec((hidden,)) for part in _EXPERT_NORMS}
            for expert in range(mixture.count):
                one = {part: name.format(e=expert) for part, name in parts(inner, "expert").items()}
                specs |= mlp_tensors(mixture.width, config, one)
        return specs

    def build(
        self, shard: Shard, weights: Weights, kernels: Kernels, *, positions: int, group: Collectives
    ) -> DecoderModel:
        from paceline.decoder.models.gemma4 import Gemma4Model
        from paceline.decoder.models.layers import Part

        return Gemma4Model(Part(shard, kernels, group, self.names), weights, positions)


_NORMS = ("norm", "post norm", "mlp norm", "post mlp norm")
_EXPERT_NORMS = ("norm", "post norm", "mlp norm")
_NAMES = LLAMA_NAMES.but(
    post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
    layer_factor="layer_scalar",
    input_gate="per_layer_input_gate",
    input_out="per_layer_projection",
    input_norm="post_per_layer_input_norm",
    router="router.proj",
    router_scale="router.scale",
    expert_scale="router.per_expert_scale",
    expert_norm="pre_feedforward_layernorm_2",
    expert_post_norm="post_feedforward_layernorm_2",
    expert_mlp_norm="post_feedforward_layernorm_1",
    **{f"expert_{part}": f"experts.{{e}}.{part}_proj" for part in ("gate", "up", "down")},
)
_GEMMA4 = _Gemma4(
    "gemma4_text",
    "Gemma 4, text only",
    names=replace(
        _NAMES,
        outer={
            **_NAMES.outer,
            "inputs": "model.embed_tokens_per_layer",
            "input projection": "model.per_layer_model_projection",
            "input norm": "model.per_layer_projection_norm",
        },
    ),
    plan=Blueprint(norms="both", head_norms="head", query_scale=1.0, local_rope=True),
    reads={
        **BIASES,
        "activation": activation("hidden_activation", "gelu_pytorch_tanh"),
        "windows": Key(
            ("layer_types", "sliding_window"),
            lambda config: tuple(config.integer("sliding_window", 512) if one else 0 for one in _kinds(config)),
        ),
        "logit_cap": number("final_logit_softcapping"),
        "embedding_scale": Key((), lambda config: config.integer("hidden_size") ** 0.5),
        "gemma": Key(
            (
                "num_kv_shared_layers", "attention_k_eq_v", "use_double_wide_mlp", "hidden_size_per_layer_input",
                "vocab_size_per_layer_input", "global_head_dim", "num_global_key_value_heads",
                "use_bidirectional_attention",
            ),
            lambda config: _layers(config, _kinds(config)),
        ),
        "experts": Key(("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"), _experts),
    },
    defaults={
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
    fused=(
        Fused("experts.gate_up_proj", _of_experts),
        Fused("experts.down_proj", lambda _: {"expert down": 1}),
    ),
)  # fmt: skip

# ---- Gemma 3n


def _slides_in_3n(_: Fields, layer: int) -> bool:
    return (layer + 1) % 5 != 0


def _numbers(config: Fields, name: str, said: object, *, most: float) -> list[float]:
    count = config.integer("num_hidden_layers")
    fits = isinstance(said, list) and len(said) == count
    if not fits or not all(isinstance(one, int | float) and 0 <= one < most for one in said):  # type: ignore[attr-defined]
        raise CheckpointError(
            f"{config.where}: {name}: expected a number below {most} for each of {count} layers, got {said!r}; correct "
            "the file"
        )
    return said  # type: ignore[return-value]


def _layers_of_3n(config: Fields) -> Gemma:
    count, sparse = config.integer("num_hidden_layers"), config.values.get("activation_sparsity_pattern")
    if sparse is None:
        sparse = [0.95 if layer < 10 < count else 0.0 for layer in range(count)]
    shares = _numbers(config, "activation_sparsity_pattern", sparse, most=1.0)
    width = config.integer("intermediate_size")
    widths = _numbers(config, "intermediate_size", config.values["mlp_widths"] or [width] * count, most=width + 1)
    streams, active = config.integer("altup_num_inputs", 4), config.integer("altup_active_idx", 0, minimum=0)
    if active >= streams:
        raise CheckpointError(
            f"{config.where}: altup_active_idx: expected less than altup_num_inputs = {streams}, got {active}; correct "
            "the file"
        )
    return replace(
        _layers(config, kinds_of_layers(config, _slides_in_3n)),
        widths=tuple(map(int, widths)),
        streams=streams,
        active=active,
        rank=config.integer("laurel_rank", 64),
        corrected=config.flag("altup_correct_scale", True),
        sparse=tuple(NormalDist().inv_cdf(one) if one else None for one in shares),
    )


class _Gemma3n(_Gemma4):
    def translated(self, config: Fields) -> Fields:
        said = config.values.get("intermediate_size")
        several = isinstance(said, list) and said and all(isinstance(one, int) and one > 0 for one in said)
        widths = {"intermediate_size": max(said), "mlp_widths": said} if several else {"mlp_widths": None}  # type: ignore[call-overload]
        return super().translated(Fields({**config.values, **widths}, config.where))

    def layer_sizes(self, config: Fields) -> tuple[tuple[int, int], ...]:
        return Family.layer_sizes(self, config)

    def tensors(self, config: ModelConfig) -> dict[str, TensorSpec]:
        plan, square = config.blueprint.gemma, TensorSpec((config.hidden_size, config.hidden_size))
        assert plan is not None
        sides = (self.names.outer[side] for side in ("stream", "unstream"))
        streams = {f"{side.format(s=s)}.weight": square for side in sides for s in range(plan.streams - 1)}
        return {**super().tensors(config), **streams}

    def layer_tensors(
        self, config: ModelConfig, prefix: str, *, index: int = 0, dense: bool = False
    ) -> dict[str, TensorSpec]:
        plan, hidden = config.blueprint.gemma, config.hidden_size
        assert plan is not None
        inner = {part: prefix + name for part, name in self.names.inner.items()}
        specs = super().layer_tensors(config, prefix, index=index, dense=dense)
        count = plan.streams
        sizes = {
            "low in": (plan.rank, hidden), "low out": (hidden, plan.rank), "low norm": (hidden,),
            "stream norm": (hidden,), "stream router": (count, hidden), "predicts": (count * count, count),
            "corrects": (count, count),
        }  # fmt: skip
        specs |= {f"{inner[part]}.weight": TensorSpec(shape) for part, shape in sizes.items()}
        return {**specs, inner["stream factors"]: TensorSpec((hidden,))}

    def build(
        self, shard: Shard, weights: Weights, kernels: Kernels, *, positions: int, group: Collectives
    ) -> DecoderModel:
        from paceline.decoder.models.gemma4 import Gemma3nModel
        from paceline.decoder.models.layers import Part

        return Gemma3nModel(Part(shard, kernels, group, self.names), weights, positions)


_GEMMA3N = _Gemma3n(
    "gemma3n_text",
    "Gemma 3n, text only",
    names=replace(
        _GEMMA4.names.but(
            layer_factor="",
            low_in="laurel.linear_left",
            low_out="laurel.linear_right",
            low_norm="laurel.post_laurel_norm",
            stream_norm="altup.router_norm",
            stream_router="altup.modality_router",
            predicts="altup.prediction_coefs",
            corrects="altup.correction_coefs",
            stream_factors="altup.correct_output_scale",
        ),
        outer={
            **_GEMMA4.names.outer,
            "stream": "model.altup_projections.{s}",
            "unstream": "model.altup_unembed_projections.{s}",
        },
    ),
    plan=_GEMMA4.plan,
    reads={
        **{name: key for name, key in _GEMMA4.reads.items() if name not in ("gemma", "experts", "windows")},
        "windows": windows(_slides_in_3n),
        "logit_cap": number("final_logit_softcapping", 30.0),
        "local_rope": Key(("rope_local_base_freq",), lambda _: True),
        "gemma": Key(
            (
                "num_kv_shared_layers", "hidden_size_per_layer_input", "vocab_size_per_layer_input",
                "altup_num_inputs", "altup_active_idx", "altup_correct_scale", "laurel_rank",
                "activation_sparsity_pattern",
            ),
            _layers_of_3n,
        ),
    },
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "num_kv_shared_layers": 15,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
)  # fmt: skip

FAMILIES = (_GEMMA, _GEMMA2, _GEMMA3, _VAULTGEMMA, _GEMMA3N, _GEMMA4)
