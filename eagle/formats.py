"""How other projects name the tensors of an EAGLE head and write its configuration, both ways.

Known: our own (``paceline``), the EAGLE repository's (``eagle``, also SpecForge's), NxD Inference's (``nxd``: EAGLE's
with copies of the target's embedding and output layer, and a layer called layers.0 in version 3 too) and
vllm-project/speculators' (``speculators``). Pure renaming; files are `checkpoint.py`'s, keys that are not understood
`known_keys.py`'s, and what readers of a written head can run is in `exports.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from paceline.core.errors import CheckpointError, ConfigurationError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.config import ModelConfig
from paceline.eagle import aux_layers, known_keys
from paceline.eagle.config import EagleConfig, check_version, parse_own

LAYOUTS = ("paceline", "eagle", "nxd", "speculators")
EMBEDDING, HEAD, OFFSETS, MASK = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"

# Prefixes of the layer, and of the fc of version 1, by layout and version.
_LAYER = {
    ("paceline", 1): "layer.",
    ("paceline", 3): "layer.",
    ("eagle", 1): "layers.0.",
    ("eagle", 3): "midlayer.",
    ("nxd", 1): "layers.0.",
    ("nxd", 3): "layers.0.",
    ("speculators", 1): "transformer.",
    ("speculators", 3): "layers.0.",
}
_REFUSED = re.compile(r"(embedding_layernorm|pre_lm_head_layernorm|embed_layernorm|input_norm|fc_norm\.\d+)\.weight")
_FURTHER = re.compile(r"(layers|midlayers|additional_layers)\.[1-9]\d*\..+")  # of a head of several layers
_MODEL = "model."  # before every name, where a head was saved as a part of a model
_TOKENS = 4  # a round, where the reader of a written head is not told how many; a chain's default here too
# Saved by some trainers, without a meaning for drafting.
_HARMLESS = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")


def layout_of(config: Fields, names: Iterable[str]) -> tuple[str, int]:
    """Which layout a checkpoint is in, and the version of its head.

    Raises:
        CheckpointError: these are no tensors of an EAGLE head.
        UnknownArchitectureError: a key of its config.json is not understood.
    """
    bare_names = {name.removeprefix(_MODEL) for name in names}
    if "paceline_eagle" in config.values:
        version = config.integer("version")
        check_version(version)
        return "paceline", version
    known_keys.check_keys(config)
    kind = config.values.get("speculators_model_type")
    if kind is not None:
        return "speculators", 3 if kind == "eagle3" else 1
    if "fc.weight" not in bare_names:
        raise CheckpointError(f"{config.where}: the weights beside it hold no fc.weight, so this is no EAGLE head")
    if any(name.startswith("midlayer.") for name in bare_names):
        return "eagle", 3
    if OFFSETS in bare_names or "layers.0.hidden_norm.weight" in bare_names:
        return "speculators" if "transformer_layer_config" in config.values else "nxd", 3
    return ("nxd" if HEAD in bare_names else "eagle"), 1


def own_name(name: str, layout: str, version: int) -> str | None:
    """Our name of a tensor; None if it means nothing here.

    Raises:
        UnknownArchitectureError: a norm or a second layer, which heads here do not have.
    """
    if layout != "paceline":
        name = name.removeprefix(_MODEL)
    if _FURTHER.fullmatch(name):
        raise UnknownArchitectureError(
            f"the tensor {name} belongs to a head of several layers, which is not supported; use a head of one layer"
        )
    if _REFUSED.fullmatch(name):
        raise UnknownArchitectureError(
            f"the tensor {name} belongs to a variant of EAGLE with more norms, which is not supported; "
            "use a head without it"
        )
    if any(name.endswith(end) for end in _HARMLESS):
        return None
    if layout == "speculators" and version == 1 and name.startswith("fusion_fc."):
        return name.replace("fusion_fc.", "fc.", 1)
    prefix = _LAYER[layout, version]
    if name.startswith(prefix):
        return "layer." + name.removeprefix(prefix)
    return name


def foreign_name(name: str, layout: str, version: int) -> str:
    """The name a layout has for one of our tensors."""
    if name.startswith("layer."):
        return _LAYER[layout, version] + name.removeprefix("layer.")
    if layout == "speculators" and version == 1 and name.startswith("fc."):
        return "fusion_" + name
    return name


def parse(
    config: Fields,
    layout: str,
    version: int,
    *,
    target: ModelConfig,
    names: Iterable[str],
    override: Sequence[int] | None = None,
) -> EagleConfig:
    """The configuration of a head in any layout. ``names`` are its tensors by our names.

    ``override``: the residual streams that a head of version 3 reads, whatever the file says.

    Raises:
        CheckpointError: a key is missing or has a wrong value.
        ConfigurationError: ``override`` is for a head of version 1, or the head names no layers of a small target.
    """
    if override is not None and version == 1:
        raise ConfigurationError(f"{config.where}: an EAGLE-1 head reads the last hidden state; leave aux_layers out")
    if layout == "paceline":
        config_fields = parse_own(config)
        if override is None:
            return config_fields
        return replace(config_fields, layers=aux_layers.overridden(config.where, config_fields.layers, override))
    nested = config.child("transformer_layer_config") if layout == "speculators" else config
    if nested is None:
        raise CheckpointError(f"{config.where}: transformer_layer_config is missing; download the file again")
    if layout == "speculators" and version == 3:
        known_keys.check_residual(config)
    # How many layers there are is said by the tensors: published files have the target's number.
    usual = {"model_type": "llama", "num_hidden_layers": 1}
    layer = Fields({**usual, **nested.values}, nested.where)
    if layer.text("model_type") != "llama":  # the layers of a head are Llama's, whatever the target is
        raise UnknownArchitectureError(
            f"{layer.where}: model_type {layer.text('model_type')!r} is not supported; supported: llama, of whose "
            "kind the layers of a head are, whatever its target is"
        )
    sizes = ModelConfig.from_fields(layer)
    present = set(names)
    layers = aux_layers.layers_of(config, target, override) if version == 3 else ()
    _check_count(config, layers)
    return EagleConfig(
        version=version,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        rms_norm_eps=sizes.rms_norm_eps,
        max_position_embeddings=sizes.max_position_embeddings,
        rope=sizes.rope,
        vocab_size=sizes.vocab_size,
        draft_vocab_size=config.integer("draft_vocab_size", sizes.vocab_size) if version == 3 else sizes.vocab_size,
        target_hidden_size=config.integer("target_hidden_size", target.hidden_size),
        attention_bias=sizes.attention_bias,
        mlp_bias=sizes.mlp_bias,
        fc_bias="fc.bias" in present,
        input_norm=version == 1 and "layer.input_layernorm.weight" in present,
        norm_before_residual=version == 3 and config.flag("norm_before_residual", False),
        layers=layers,
    )


def _check_count(config: Fields, layers: Sequence[int]) -> None:
    """Raise CheckpointError where ``num_aux_hidden_states`` is there and says something else."""
    for fields in (config, config.child("eagle_config")):
        count = fields.values.get("num_aux_hidden_states") if fields is not None else None
        if layers and count is not None and count != len(layers):
            raise CheckpointError(
                f"{config.where}: num_aux_hidden_states is {count!r}, and the head reads residual streams "
                f"{list(layers)}; correct the file, or set aux_layers"
            )


def written(config: EagleConfig, layout: str, *, base: str = "") -> dict[str, object]:
    """The config.json of a foreign layout. ``base``: name or path of the target, for speculators.

    Raises:
        ConfigurationError: there is no such layout.
    """
    if layout not in LAYOUTS:
        raise ConfigurationError(f"layout={layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
    sizes = _sizes(config)
    if layout != "speculators":
        extra: dict[str, object] = {"fc_bias" if layout == "nxd" else "bias": config.fc_bias}
        if config.version == 3:
            layers = {"eagle_aux_hidden_state_layer_ids": list(config.layers)}
            extra = {"draft_vocab_size": config.draft_vocab_size, "eagle_config": layers}
            if config.target_hidden_size != config.hidden_size:
                extra["target_hidden_size"] = config.target_hidden_size
        return {**sizes, **extra}
    kind = "eagle3" if config.version == 3 else "eagle"
    head: dict[str, object] = {
        "architectures": [f"{kind.capitalize()}Speculator"],
        "speculators_model_type": kind,
        # vLLM does not load a head that lacks this.
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _TOKENS}],
            "verifier": {"name_or_path": base or None, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": sizes,
    }
    if config.version == 1:
        return {**head, "layernorms": False, "fusion_bias": config.fc_bias}
    return {
        **head,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.layers),
    }


def _sizes(config: EagleConfig) -> dict[str, object]:
    """Hugging Face's names of the layer's sizes."""
    rope = {name: value for name, value in asdict(config.rope).items() if value not in (None, ())}
    kind, theta = rope.pop("type"), rope.pop("theta")
    rope.pop("max_position_embeddings")
    sizes: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "rope_theta": theta,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return sizes if kind == "default" else {**sizes, "rope_scaling": {"rope_type": kind, **rope}}
