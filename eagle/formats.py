"""Conversion of tensor names and configurations of EAGLE heads from and to the formats of other projects.

Known: our own (``paceline``), the EAGLE repository's (``eagle``, also SpecForge's), NxD Inference's (``nxd``: EAGLE's
with copies of the target's embedding and output layer, and a layer called layers.0 in version 3 too) and
vllm-project/speculators' (``speculators``). Files and the limits of readers are in `checkpoint.py`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.core.errors import CheckpointError, ConfigurationError, UnknownArchitectureError
from paceline.core.types import DraftShape
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.config import STANDARD, ModelConfig
from paceline.eagle.config import EagleConfig, check_own, check_version, layers_of, overridden, parse_layers, parse_own
from paceline.heads import layouts
from paceline.heads.layouts import HeadKeys, MustBe, head_format
from paceline.heads.options import Wanted

log = logging.getLogger("paceline")

_LAYER_KEYS = STANDARD | {"attention_bias", "mlp_bias", "layer_types", "sliding_window"}
_HEAD_KEYS = frozenset(
    {
        "draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_config", "speculators_model_type",
        "transformer_layer_config", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "norm_output",
        "fc_norm", "norm_before_fc", "mask_token_id", "ptd_token_id", "pard_token", "parallel_drafting",
    }
)  # fmt: skip
_SWITCHES = ("fc_norm", "norm_before_fc", "norm_output")
_EAGLE_CONFIG_KEYS = frozenset({"eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "has_lm_head", *_SWITCHES})
_MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token")
"""Names of the id that stands for tokens not yet known: in speculators, and two in vLLM."""
# Without effect on drafting, or determined by the tensors.
_HARMLESS_KEYS = {
    "bias", "bos_token_id", "eos_token_id", "fc_bias", "fusion_bias", "has_lm_head", "num_hidden_layers",
    "pad_token_id", "speculators_config", "speculators_version", "target_model_type", "tie_word_embeddings",
}  # fmt: skip
_MUST_BE: dict[str, MustBe] = {
    "norm_bias": MustBe((False,), "norms have biases"),
    "qkv_bias": MustBe((False,), "queries, keys and values have biases and the output has none"),
    "layernorms": MustBe((False,), "an EAGLE-1 head has separate norms"),
    "use_sliding_window": MustBe((False,), "attention sees a window of the text only"),
    "is_causal": MustBe((True,), "attention also looks ahead"),
    "use_mrope": MustBe((False,), "positions have several dimensions"),
    "logit_scale": MustBe((1, 1.0), "logits are scaled"),
    "is_encoder_decoder": MustBe((False,), "the head is an encoder and a decoder"),
    "add_cross_attention": MustBe((False,), "the head attends to something besides the text"),
    "inference_type": MustBe(("text",), "the target reads more than text"),
    "transformer_layer_architecture": MustBe(("LlamaDecoderLayer",), "the layer is not that of Llama"),
}
_EAGLE_CONFIG: dict[str, MustBe] = {
    "use_aux_hidden_state": MustBe((True,), "an EAGLE-3 layer reads the target's last hidden state instead of three"),
    "use_input_layernorm_in_first_layer": MustBe((True,), "the embedding is not normalised"),
    "use_last_layernorm": MustBe((True,), "there is no norm before the output layer"),
    "use_mtp_layernorm": MustBe((False,), "the head has the norms of multi-token prediction"),
    "next_layer_regular": MustBe((True,), "further layers are not like the first"),
    "parallel_draft_step": MustBe((1,), "several tokens are drafted in one pass"),
    "parallel_draft_heads_num_layers": MustBe((0, 1), "several tokens are drafted in one pass"),
}
# Both keys must be equal if both are present.
_TWINS = (("truncated_vocab_size", "draft_vocab_size"), ("target_vocab_size", "vocab_size"))
_OTHER_KINDS = {"dflash": "DFlash", "dspark": "DSpark", "medusa": "Medusa"}


def _check_keys(config: Fields) -> None:
    """Raise unless all keys are understood, also those in ``eagle_config`` and ``transformer_layer_config``."""
    _check_kind(config)
    nested, layer = config.child("eagle_config"), config.child("transformer_layer_config")
    head_keys = _HEAD_KEYS | ({"model_type"} if layer is not None else _LAYER_KEYS)
    HeadKeys(_OF, head_keys | _HARMLESS_KEYS | {name for name, _ in _TWINS}, _MUST_BE).check(config)
    if nested is not None:
        HeadKeys(_OF, _EAGLE_CONFIG_KEYS, {**_MUST_BE, **_EAGLE_CONFIG}).check(nested)
    if layer is not None:
        HeadKeys(_OF, _LAYER_KEYS | _HARMLESS_KEYS, _MUST_BE).check(layer)
    _check_attention(layer or config)
    for first_key, second_key in _TWINS:
        first, second = config.values.get(first_key), config.values.get(second_key)
        if first is not None and first != second:
            raise CheckpointError(
                f"{config.where}: expected equal values, got {first_key}={first!r} and {second_key}={second!r}; "
                "correct the file"
            )


def _check_residual(config: Fields) -> None:
    """Raise CheckpointError unless a head in the layout of speculators states where its residual stream begins.

    Its own class takes an absent key for false (`Eagle3SpeculatorConfig`), vLLM for true (pull request 25961).
    """
    if config.values.get("norm_before_residual") is None:
        raise CheckpointError(
            f"{config.where}: expected the key norm_before_residual, got none, and its default differs (true in "
            'vLLM, false in speculators); add "norm_before_residual": true or false, as the head was trained'
        )


def _check_kind(config: Fields) -> None:
    kind = config.values.get("speculators_model_type")
    if kind is not None and kind not in ("eagle", "eagle3", "peagle"):
        raise UnknownArchitectureError(
            f"{config.where}: speculators_model_type: expected eagle, eagle3 or peagle, got {kind!r}; use a head of "
            "one of these types"
        )
    architectures = config.values.get("architectures")
    for name in architectures if isinstance(architectures, list) else []:
        for part, meaning in _OTHER_KINDS.items():
            if part in str(name).lower():
                raise UnknownArchitectureError(
                    f"{config.where}: architectures: expected an EAGLE head, got {name} ({meaning}), "
                    "which is not supported; use an EAGLE head"
                )


def _check_attention(layer: Fields) -> None:
    """Accept a window only if the file states that it is not used."""
    types, window = layer.values.get("layer_types"), layer.values.get("sliding_window")
    full = isinstance(types, list) and all(name == "full_attention" for name in types)
    if types is not None and not full:
        raise UnknownArchitectureError(
            f"{layer.where}: layer_types: expected full attention only, got {types!r}; use a head with full attention"
        )
    if window is not None and not full and layer.values.get("use_sliding_window") is not False:
        raise UnknownArchitectureError(
            f"{layer.where}: sliding_window: expected none, since sliding-window attention is not supported, got "
            f'{window!r}; use a head with full attention, or add "use_sliding_window": false if it has'
        )


def draft_shape(
    target: ModelConfig,
    wanted: Wanted,
    folder: Path,
    *,
    draft_tree: object = None,
    aux_layers: object = None,
    divided: object = None,
    quantization: object = None,
) -> DraftShape:
    """Check the options of a draft (those of `EagleDrafter.from_pretrained`) and the config.json of Paceline's layout:
    tensors identify others. -> the shape of its drafts
    """
    del divided  # whose errors need the target's ranks
    parse_layers(aux_layers)
    head_format(quantization)
    check_own(folder, target)
    if draft_tree is None:
        return DraftShape.chain(wanted.k)
    from paceline.eagle.tree import parse_draft_tree  # loads PyTorch

    return parse_draft_tree(draft_tree, k=wanted.k, drawn=wanted.drawn).draft_shape


LAYOUTS = ("paceline", "eagle", "nxd", "speculators")
EMBEDDING, HEAD, OFFSETS, MASK = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
MASKED = "mask_hidden"
"""P-EAGLE: what stands for the target's states at positions not yet known."""

_OF = "an EAGLE head"
_PREFIXES: dict[tuple[str, int], layouts.Prefixes] = {
    ("paceline", 1): (),
    ("paceline", 3): (),
    ("eagle", 1): (("layer.", "layers.0."),),
    ("eagle", 3): (("layer.", "midlayer."),),
    ("nxd", 1): (("layer.", "layers.0."),),
    ("nxd", 3): (("layer.", "layers.0."),),
    ("speculators", 1): (("layer.", "transformer."), ("fc.", "fusion_fc.")),
    ("speculators", 3): (("layer.", "layers.0."),),
}
"""Prefixes by layout and version."""
_REFUSED = re.compile(r"(embedding_layernorm|pre_lm_head_layernorm|embed_layernorm)\.weight")
_FURTHER = re.compile(r"(midlayers|additional_layers)\.\d+\..+")  # further layers of a kind that is not read here
_LAYER = re.compile(r"layers\.(\d+)\..+")
_MODEL = "model."  # before every name, if a head was saved as a part of a model
_TOKENS = 4  # per round, if the reader of a written head gets no number; also a chain's default in Paceline
# Saved by some trainers, without effect on drafting.
_HARMLESS_TENSORS = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")


def layout_of(config: Fields, names: Iterable[str]) -> tuple[str, int]:
    """Return the layout of a checkpoint of an EAGLE head, and the version of the head; else raise CheckpointError."""
    bare_names = {name.removeprefix(_MODEL) for name in names}
    if "paceline_eagle" in config.values:
        version = config.integer("version")
        check_version(version)
        return "paceline", version
    _check_keys(config)
    kind = config.values.get("speculators_model_type")
    if kind is not None:
        return "speculators", 1 if kind == "eagle" else 3
    if "fc.weight" not in bare_names:
        raise CheckpointError(
            f"{config.where}: expected the tensor fc.weight among the weights, got none, so this is not an EAGLE "
            "head; use the folder of an EAGLE head"
        )
    if any(name.startswith("midlayer.") for name in bare_names):
        return "eagle", 3
    if OFFSETS in bare_names or "layers.0.hidden_norm.weight" in bare_names:
        return "speculators" if "transformer_layer_config" in config.values else "nxd", 3
    return ("nxd" if HEAD in bare_names else "eagle"), 1


def own_name(name: str, layout: str, version: int) -> str | None:
    """Return our name of a tensor; None if it has no effect."""
    if layout != "paceline":
        name = name.removeprefix(_MODEL)
    if _FURTHER.fullmatch(name):
        raise UnknownArchitectureError(
            f"weights: expected further layers as layers.1 and on, got the tensor {name} of another kind, which is "
            "not supported; use another head"
        )
    if _REFUSED.fullmatch(name):
        raise UnknownArchitectureError(
            f"weights: expected a plain EAGLE head, got the tensor {name} of a variant with more norms, which is "
            "not supported; use a head without it"
        )
    if any(name.endswith(end) for end in _HARMLESS_TENSORS):
        return None
    return layouts.own_name(name, _PREFIXES[layout, version])


def foreign_name(name: str, layout: str, version: int) -> str:
    return layouts.foreign_name(name, _PREFIXES[layout, version])


def parse(
    config: Fields,
    layout: str,
    version: int,
    *,
    target: ModelConfig,
    names: Iterable[str],
    override: Sequence[int] | None = None,
) -> EagleConfig:
    """Parse the configuration of a head in any layout.

    names     its tensors, by our names
    override  the residual streams that a head of version 3 reads, in place of the file's
    """
    if override is not None and version == 1:
        raise ConfigurationError(
            f"{config.where}: aux_layers: expected none for an EAGLE-1 head, which reads the target's last hidden "
            f"state only, got {list(override)}; omit aux_layers"
        )
    if layout == "paceline":
        own = parse_own(config)
        return own if override is None else replace(own, layers=overridden(config.where, own.layers, override))
    nested = config.child("transformer_layer_config") if layout == "speculators" else config
    if nested is None:
        raise CheckpointError(f"{config.where}: the key transformer_layer_config is missing; download the file again")
    if layout == "speculators" and version == 3:
        _check_residual(config)
    sizes, has_qk_norm = _sizes_of(nested)
    present = set(names)
    layers = layers_of(config, target, override) if version == 3 else ()
    _check_count(config, layers)
    switches: dict[str, Any] = {name: _switch(config, name) for name in _SWITCHES}
    if switches["norm_output"] and layout != "speculators":
        log.warning(
            "%s: norm_output: drafts read the state after the last norm, as in vLLM and SGLang; SpecForge before its "
            "pull request 879 trained such heads on the state before it: if few second drafts are accepted, remove "
            "the key", config.where,
        )  # fmt: skip
    return EagleConfig(
        **EagleConfig.of(sizes),
        version=version,
        draft_vocab_size=config.integer("draft_vocab_size", sizes.vocab_size) if version == 3 else sizes.vocab_size,
        target_hidden_size=config.integer("target_hidden_size", target.hidden_size),
        fc_bias="fc.bias" in present,
        input_norm=version == 1 and "layer.input_layernorm.weight" in present,
        norm_before_residual=version == 3 and config.flag("norm_before_residual", False),
        layers=layers,
        num_layers=1 + len({match[1] for name in present if (match := _LAYER.fullmatch(name))}),
        qk_norm=has_qk_norm or "layer.self_attn.q_norm.weight" in present,
        shares_output=version == 3 and HEAD not in present,
        mask_token=_mask_token(config, present),
        **switches,
    )


def _sizes_of(nested: Fields) -> tuple[ModelConfig, bool]:
    """Return the sizes of a head's layers, and whether the config says that queries and keys are normalised."""
    # The tensors determine the number of layers: published files have the target's number.
    usual = {"model_type": "llama", "num_hidden_layers": 1}
    layer = Fields({**usual, **nested.values}, nested.where)
    family = layer.text("model_type")
    if family not in ("llama", "qwen3"):  # a head's layer is one of these for every target
        raise UnknownArchitectureError(
            f"{layer.where}: model_type: expected llama or qwen3 in a head, got {family!r}; use another head"
        )
    sizes = ModelConfig.from_fields(Fields({**layer.values, "model_type": "llama"}, layer.where))
    if sizes.blueprint.activation != "silu":
        raise UnknownArchitectureError(
            f"{layer.where}: hidden_act: expected silu in a head, got {sizes.hidden_act!r}; use another head"
        )
    return sizes, family == "qwen3"


def _switch(config: Fields, name: str) -> bool:
    """Return a key that may stand at the top level or in ``eagle_config``; False if it is absent."""
    nested = config.child("eagle_config")
    found = {fields.flag(name, False) for fields in (config, nested) if fields and fields.values.get(name) is not None}
    if len(found) > 1:
        raise CheckpointError(
            f"{config.where}: expected the same {name} at the top level and in eagle_config, got both values; keep the "
            "one the head was trained with"
        )
    return found == {True}


def _mask_token(config: Fields, names: Iterable[str]) -> int | None:
    """Return the id that stands for unknown tokens in a P-EAGLE head; None for another head."""
    architectures = config.values.get("architectures")
    said = [config.values.get("speculators_model_type"), *(architectures if isinstance(architectures, list) else [])]
    parallel = config.flag("parallel_drafting", False) or any("peagle" in str(name).lower() for name in said)
    if not parallel and MASKED not in names:
        return None
    found = {config.integer(name, minimum=0) for name in _MASK_TOKENS if config.values.get(name) is not None}
    if len(found) != 1:
        raise CheckpointError(
            f"{config.where}: expected the id that stands for unknown tokens in a P-EAGLE head as one of "
            f"{', '.join(_MASK_TOKENS)}, got {sorted(found) or 'none'}; add mask_token_id as the head was trained"
        )
    return found.pop()


def _check_count(config: Fields, layers: Sequence[int]) -> None:
    for fields in (config, config.child("eagle_config")):
        count = fields.values.get("num_aux_hidden_states") if fields is not None else None
        if layers and count is not None and count != len(layers):
            raise CheckpointError(
                f"{config.where}: num_aux_hidden_states: expected {len(layers)}, since the head reads residual "
                f"streams {list(layers)}, got {count!r}; correct the file, or set aux_layers"
            )


def written(config: EagleConfig, layout: str, *, base: str = "") -> dict[str, object]:
    """Return the config.json of a layout. ``base``: name or path of the target, for speculators."""
    layouts.check_layout(layout, LAYOUTS)
    if layout == "paceline":
        return {"paceline_eagle": 1, **asdict(config)}
    sizes = layouts.written_sizes(config, num_layers=config.num_layers, qk_norm=config.qk_norm)
    if layout != "speculators":
        extra: dict[str, object] = {"fc_bias" if layout == "nxd" else "bias": config.fc_bias}
        if config.version == 3:
            layers = {"eagle_aux_hidden_state_layer_ids": list(config.layers)}
            extra = {"draft_vocab_size": config.draft_vocab_size, "eagle_config": layers}
            if config.target_hidden_size != config.hidden_size:
                extra["target_hidden_size"] = config.target_hidden_size
        return {**sizes, **extra}
    parallel = config.mask_token is not None
    kind = "peagle" if parallel else "eagle3" if config.version == 3 else "eagle"
    head: dict[str, object] = {
        "architectures": ["PEagleSpeculator" if parallel else f"{kind.capitalize()}Speculator"],
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
        **{name: True for name in _SWITCHES if getattr(config, name)},
        **({"mask_token_id": config.mask_token} if parallel else {}),
    }
