"""Keys of other projects' config.json of an EAGLE head: which are understood, which may be passed over, which not.

A key that changes what a head computes and adds no tensor would be lost without a word, and the head would draft badly.
So every key is in a table here: it is read elsewhere, says nothing about the computation, or must have the one value
that changes nothing. All others are refused by name. A key whose value is null counts as absent. Not here: what the
keys that are read mean (`paceline.eagle.formats`), and our own files, which have no other keys than ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass

from paceline.core.errors import CheckpointError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields

# Read by `paceline.decoder.models.config` or `paceline.eagle.formats`.
_LAYER_KEYS = frozenset(
    {
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act", "attention_bias", "mlp_bias",
        "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings",
        "quantization_config", "per_layer_config", "layer_types", "sliding_window",
    }
)  # fmt: skip
_HEAD_KEYS = frozenset(
    {
        "draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_config", "speculators_model_type",
        "transformer_layer_config", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states",
    }
)  # fmt: skip
_EAGLE_CONFIG_KEYS = frozenset({"eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "has_lm_head"})
# Without a meaning for drafting, or decided by the tensors.
_HARMLESS = frozenset(
    {
        "_name_or_path", "architectures", "attention_dropout", "auto_map", "base_model_ep_plan", "base_model_pp_plan",
        "base_model_tp_plan", "bias", "bos_token_id", "chunk_size_feed_forward", "dtype", "embed_requires_grad",
        "eos_token_id", "fc_bias", "fusion_bias", "has_lm_head", "has_no_defaults_at_init", "id2label",
        "initializer_range", "label2id", "max_sequence_length", "max_window_layers", "name_or_path",
        "num_hidden_layers", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp",
        "problem_type", "return_dict", "speculators_config", "speculators_version", "target_model_type",
        "tie_word_embeddings", "torch_dtype", "torchscript", "transformers_version", "use_bfloat16", "use_cache",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MustBe:
    """A key that is understood with some of its values only; ``meaning`` says what another one asks for."""

    values: tuple[object, ...]
    meaning: str


_MUST_BE: dict[str, MustBe] = {
    "norm_output": MustBe((False,), "the state after the last norm is fed back (EAGLE-3.1)"),
    "fc_norm": MustBe((False,), "every stream of the target has a norm of its own (EAGLE-3.1)"),
    "norm_before_fc": MustBe((False,), "the joined streams of the target are normalised before fc"),
    "norm_bias": MustBe((False,), "norms have biases"),
    "qkv_bias": MustBe((False,), "queries, keys and values have biases and the output has none"),
    "layernorms": MustBe((False,), "an EAGLE-1 head has norms of its own"),
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
# Both must say the same where both are there.
_TWINS = (("truncated_vocab_size", "draft_vocab_size"), ("target_vocab_size", "vocab_size"))
_OTHER_KINDS = {"peagle": "P-EAGLE, all drafts in one pass", "dflash": "DFlash", "dspark": "DSpark", "medusa": "Medusa"}


def check_keys(config: Fields) -> None:
    """Raise unless every key is understood: the head's, and those in ``eagle_config`` and ``transformer_layer_config``.

    Raises:
        UnknownArchitectureError: a key is unknown, or asks for a head that is not supported.
        CheckpointError: a key that must be there is not, or two contradict each other.
    """
    _check_kind(config)
    nested, layer = config.child("eagle_config"), config.child("transformer_layer_config")
    head_keys = _HEAD_KEYS | ({"model_type"} if layer is not None else _LAYER_KEYS)
    if layer is None and config.values.get("norm_output") is not None:
        raise UnknownArchitectureError(
            f"{config.where}: norm_output has two meanings: in vLLM true feeds back the state after the last norm "
            "(EAGLE-3.1), which is not supported, and in SpecForge false leaves out the norm before the output layer; "
            "remove the key if the head is a plain EAGLE-3 head"
        )
    _check(config, head_keys | _HARMLESS | {name for name, _ in _TWINS}, _MUST_BE)
    if nested is not None:
        _check(nested, _EAGLE_CONFIG_KEYS, {**_MUST_BE, **_EAGLE_CONFIG})
    if layer is not None:
        _check(layer, _LAYER_KEYS | _HARMLESS, _MUST_BE)
    _check_attention(layer or config)
    for first_key, second_key in _TWINS:
        first, second = config.values.get(first_key), config.values.get(second_key)
        if first is not None and first != second:
            raise CheckpointError(
                f"{config.where}: {first_key} is {first!r} and {second_key} {second!r}; correct the file"
            )


def check_residual(config: Fields) -> None:
    """Raise CheckpointError unless a head in the layout of speculators says where its residual stream begins.

    Its own class takes an absent key for false (`Eagle3SpeculatorConfig`), vLLM for true (pull request 25961).
    """
    if config.values.get("norm_before_residual") is None:
        raise CheckpointError(
            f"{config.where}: norm_before_residual is missing; vLLM takes that for true and speculators for false, so "
            'add "norm_before_residual": true or false, as the head was trained'
        )


def _check_kind(config: Fields) -> None:
    kind = config.values.get("speculators_model_type")
    if kind is not None and kind not in ("eagle", "eagle3"):
        raise UnknownArchitectureError(
            f"{config.where}: speculators_model_type {kind!r} is not supported; supported: eagle, eagle3"
        )
    architectures = config.values.get("architectures")
    for name in architectures if isinstance(architectures, list) else []:
        for part, meaning in _OTHER_KINDS.items():
            if part in str(name).lower():
                raise UnknownArchitectureError(
                    f"{config.where}: architectures names {name}, a head of another kind ({meaning}), which is not "
                    "supported; use an EAGLE-1, -2 or -3 head"
                )


def _check(fields: Fields, known_keys: Set[str], must_be: Mapping[str, MustBe]) -> None:
    for key, value in fields.values.items():
        if value is None:
            continue
        rule = must_be.get(key)
        if rule is not None and not any(type(value) is type(allowed) and value == allowed for allowed in rule.values):
            raise UnknownArchitectureError(
                f"{fields.where}: {key} = {json.dumps(value)} is not supported: {rule.meaning}; use a head with "
                f"{key} = {json.dumps(rule.values[0])}"
            )
        if rule is None and key not in known_keys:
            raise UnknownArchitectureError(
                f"{fields.where}: {key!r} is not a setting of an EAGLE head known here, and passing over it could make "
                "the head draft badly; remove it if it has no effect"
            )


def _check_attention(layer: Fields) -> None:
    """A window is accepted only where the file says that it is not used."""
    types, window = layer.values.get("layer_types"), layer.values.get("sliding_window")
    full = isinstance(types, list) and all(name == "full_attention" for name in types)
    if types is not None and not full:
        raise UnknownArchitectureError(
            f"{layer.where}: layer_types = {types!r} is not supported; use a head with full attention"
        )
    if window is not None and not full and layer.values.get("use_sliding_window") is not False:
        raise UnknownArchitectureError(
            f"{layer.where}: sliding_window = {window!r} is not supported: attention sees a window of the text only; "
            'use a head with full attention, or add "use_sliding_window": false if it has'
        )
