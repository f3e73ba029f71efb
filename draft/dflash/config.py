"""Configuration of a DFlash head, read from the files of z-lab and SpecForge, DeepSpec, speculators and transformers.

Every key is read, has no effect on drafting, or must have its neutral value; others are refused by name. It holds no
weights. Stream i of the target is the input of its layer i. The files name layers in two ways: speculators by the
stream that is read, the others by the layer whose output is read, which is one less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.core.errors import CheckpointError, ConfigurationError, PairingError, UnknownArchitectureError
from paceline.core.types import DraftShape
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.config import NEUTRAL, STANDARD, ModelConfig
from paceline.decoder.options import MAX_WIDTH, option
from paceline.draft.options import parse_draft_tree
from paceline.heads.layouts import HeadKeys, LayerSizes, MustBe, check_target, head_format, layer_ids, read_config
from paceline.heads.options import Wanted

MarkovKind = Literal["vanilla", "gated", "rnn"]
_OF = "a DFlash head"
_ASSISTANT = "muse_glimmer_assistant"
_SPECULATORS = ("dflash", "dflash2", "dspark")
_ARCHITECTURES = ("dflash", "dspark")
_BLOCK = 16  # of z-lab's own code, if a file has none


def is_dflash_config(fields: Mapping[str, object]) -> bool:
    """Return whether a config.json describes a DFlash, DFlash 2 or DSpark head, in any layout."""
    architectures = fields.get("architectures")
    named = [str(name).lower() for name in architectures] if isinstance(architectures, list) else []
    return (
        "dflash_config" in fields
        or fields.get("model_type") == _ASSISTANT
        or fields.get("speculators_model_type") in _SPECULATORS
        or any(part in name for name in named for part in _ARCHITECTURES)
    )


@dataclass(frozen=True, slots=True)
class LayerRule:
    """Attention of a layer: the sliding window (0: none), and whether the block's tokens see only those before."""

    window: int = 0
    causal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(LayerSizes):
    """One head; its width is the target's.

    rules         attention of each layer
    block_size    tokens of a block: the last committed one, and mask tokens
    from_anchor   the last committed token's row predicts the first draft (DSpark), else the first mask token's row
    conv_size, conv_group   DFlash 2: taps of the convolutions of a layer, and channels that share a kernel; 0: none
    selector_rank, selector_top   DFlash 2: rank of the selector, and candidates of a position; 0: none
    markov_rank, markov   DSpark: rank and kind of the Markov head; 0: none
    confidence    DSpark: width of the input of the confidence head, which is not used; 0: none
    embedding_scale, logit_scale, logit_cap   factors of the target's embedding and logits, and the soft cap (0: none)
    """

    rules: tuple[LayerRule, ...]
    block_size: int
    mask_token: int
    from_anchor: bool = False
    conv_size: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    selector_top: int = 0
    markov_rank: int = 0
    markov: MarkovKind = "vanilla"
    confidence: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0

    @property
    def most(self) -> int:
        """Largest number of tokens that the head drafts."""
        return min(self.block_size if self.from_anchor else self.block_size - 1, MAX_WIDTH // 2 - 1)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor except the vocabulary map and copies of the target's tables."""
        size = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, size * len(self.layers))}
        shapes |= {"hidden_norm.weight": (size,), "norm.weight": (size,)}
        layer = self.layer_shapes(size, input_norm=True, qk_norm=True)
        for index in range(len(self.rules)):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
            if self.conv_size:
                for part in ("attention_conv", "mlp_conv"):
                    shapes[f"layers.{index}.{part}.base_kernel"] = (2, self.conv_size, size)
                    kernels = 2 * self.conv_size * (size // self.conv_group)
                    shapes[f"layers.{index}.{part}.kernel_projection.weight"] = (kernels, size)
        return shapes | self._selector_shapes()

    def _selector_shapes(self) -> dict[str, tuple[int, ...]]:
        size, shapes = self.hidden_size, dict[str, tuple[int, ...]]()
        if rank := self.selector_rank:
            for side in ("predecessor", "successor"):
                shapes[f"candidate_selector.{side}_codebook"] = (self.vocab_size, rank)
            shapes["candidate_selector.hidden_projection.weight"] = (rank, size)
        if rank := self.markov_rank:
            shapes["markov_head.markov_w1.weight"] = (self.vocab_size, rank)
            shapes["markov_head.markov_w2.weight"] = (self.draft_vocab_size, rank)
            if self.markov != "vanilla":
                name, rows, reads = ("gate", rank, rank) if self.markov == "gated" else ("joint", 3 * rank, 2 * rank)
                shapes[f"markov_head.{name}_proj.weight"] = (rows, size + reads)
                shapes[f"markov_head.{name}_proj.bias"] = (rows,)
        if self.confidence:
            shapes |= {"confidence_head.proj.weight": (1, self.confidence), "confidence_head.proj.bias": (1,)}
        return shapes

    def check_k(self, k: int) -> None:
        if not 1 <= k <= self.most:
            raise ConfigurationError(
                f"k: expected 1 to {self.most} for this DFlash head, whose blocks have {self.block_size} tokens, got "
                f"{k}; correct k"
            )


def draft_shape(
    target: ModelConfig, wanted: Wanted, folder: Path, *, draft_tree: str = "chain", quantization: object = None
) -> DraftShape:
    """Check the config.json and the options of a draft, which are those of `DFlashDrafter.from_pretrained`; return the
    shape of its drafts.
    """
    head_format(quantization)
    config = parse(read_config(folder), target)
    shape = parse_draft_tree(draft_tree, k=min(wanted.k, config.most), drawn=wanted.drawn)
    config.check_k(shape.depth)
    return shape


_LAYER_KEYS = frozenset({"attention_bias", "use_sliding_window", "sliding_window", "layer_types", "max_window_layers"})
_READ = STANDARD | _LAYER_KEYS
_LAYER_MUST_BE = {
    **{
        key: MustBe((value,), "the layers are those of Qwen3")
        for key, value in NEUTRAL.items()
        if key not in _LAYER_KEYS
    },
    "hidden_act": MustBe(("silu",), "the layers are those of Qwen3"),
    "partial_rotary_factor": MustBe((1.0,), "all dimensions of a head are rotated"),
}
# Keys of z-lab, SpecForge, DeepSpec and NVIDIA, of drafting or of training alone.
_BLOCK_KEYS = frozenset({"block_size", "mask_token_id", "target_layer_ids"})
_VARIANT_KEYS = frozenset(
    {
        "conv_group_size", "conv_kernel_size", "selector_rank", "selector_top_k", "markov_rank", "markov_head_type",
        "enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor",
    }
)  # fmt: skip
_FLAT_KEYS = frozenset(
    {
        "dflash_config", "is_causal", "num_target_layers", "num_anchors", "draft_vocab_size",
        "eagle_aux_hidden_state_layer_ids", "num_aux_layers", "has_embed_tokens", "has_lm_head", "train_embed_tokens",
    }
)  # fmt: skip
_FLAT_MUST_BE = {
    "attention_sink_bias": MustBe((False,), "heads have no attention sinks"),
    "causal": MustBe((False,), "a block's tokens see each other"),
    "dflash_query_causal": MustBe((False,), "a block's tokens see each other"),
    "use_swa": MustBe((False,), "sliding windows are read from layer_types"),
    "projector_type": MustBe(("dspark",), "only the Markov head of DSpark changes the logits"),
}
_INNER_KEYS = frozenset({"final_logit_softcapping", "output_multiplier", "input_embedding_scale"})
_SPECULATORS_KEYS = frozenset(
    {
        "aux_hidden_state_layer_ids", "draft_vocab_size", "max_anchors", "sliding_window_non_causal",
        "speculators_config", "speculators_model_type", "speculators_version", "target_hidden_size",
        "tie_word_embeddings", "transformer_layer_config",
    }
)  # fmt: skip


def parse(fields: Fields, target: ModelConfig, *, drafted: int | None = None) -> DFlashConfig:
    """Parse the config.json of a head for this target. ``drafted``: rows of the head's own output layer, if any."""
    if "speculators_model_type" in fields.values:
        config = _of_speculators(fields)
    elif fields.values.get("model_type") == _ASSISTANT:
        config = _of_transformers(fields, target)
    else:
        config = _flat(fields, target)
    if drafted is not None and drafted != config.draft_vocab_size:
        raise CheckpointError(
            f"{fields.where}: draft_vocab_size: expected {drafted}, the rows of lm_head.weight, got "
            f"{config.draft_vocab_size}; use the file that belongs to the weights"
        )
    check_target(
        "DFlash head", target, vocab_size=config.vocab_size, hidden_size=config.hidden_size, layers=config.layers
    )
    return config


def _flat(fields: Fields, target: ModelConfig) -> DFlashConfig:
    """z-lab, SpecForge, DeepSpec and NVIDIA: keys of a Qwen3 and of the head, some of these in ``dflash_config``."""
    must_be = {key: rule for key, rule in _LAYER_MUST_BE.items() if key != "is_causal"}
    outer = _READ | _BLOCK_KEYS | _VARIANT_KEYS | _FLAT_KEYS
    HeadKeys(_OF, outer, must_be | _FLAT_MUST_BE).check(fields)
    inner = fields.child("dflash_config") or Fields({}, fields.where)
    HeadKeys(_OF, _BLOCK_KEYS | _VARIANT_KEYS | _INNER_KEYS | {"swa_window_size"}, _FLAT_MUST_BE).check(inner)
    both = Fields({**fields.values, **{k: v for k, v in inner.values.items() if v is not None}}, fields.where)
    for key, value in inner.values.items():
        if fields.values.get(key) not in (None, value):
            raise CheckpointError(
                f"{fields.where}: {key}: expected the same value at the top level and in dflash_config, got "
                f"{fields.values[key]!r} and {value!r}; keep the one the head was trained with"
            )
    count = both.values.get("num_target_layers")
    if count is not None and count != target.num_layers:
        raise PairingError(
            f"draft: expected a target of {count} layers for this DFlash head, got {target.num_layers}; use the head "
            "that was trained for this target"
        )
    causal = both.values.get("is_causal")
    if causal is not None:
        both.flag("is_causal", False)
    windows = _windows(both)
    rules = tuple(LayerRule(window or 0, slides if causal is None else bool(causal)) for window, slides in windows)
    names = str(both.values.get("architectures")).lower()
    return _made(
        both,
        layers=_outputs(both, target),
        rules=rules,
        draft_vocab_size=both.integer("draft_vocab_size", both.integer("vocab_size")),
        block_size=both.integer("block_size", _BLOCK, minimum=2),
        from_anchor=both.flag("sample_from_anchor", "dspark" in names),
    )


def _of_transformers(fields: Fields, target: ModelConfig) -> DFlashConfig:
    """The assistant of transformers (5.24): its windows count the positions before a token."""
    HeadKeys(_OF, _READ | _BLOCK_KEYS, _LAYER_MUST_BE).check(fields)
    full = Fields({"vocab_size": target.vocab_size, "use_sliding_window": True, **fields.values}, fields.where)
    rules = tuple(LayerRule(window + 1 if window else 0) for window, _ in _windows(full))
    return _made(
        full,
        layers=_outputs(full, target),
        rules=rules,
        draft_vocab_size=target.vocab_size,
        block_size=full.integer("block_size", minimum=2),
        from_anchor=False,
    )


def _of_speculators(fields: Fields) -> DFlashConfig:
    kind = fields.text("speculators_model_type")
    layer = fields.child("transformer_layer_config")
    if layer is None:
        raise CheckpointError(f"{fields.where}: the key transformer_layer_config is missing; download the file again")
    known = _SPECULATORS_KEYS | _BLOCK_KEYS - {"target_layer_ids"} | _VARIANT_KEYS
    states = {"use_aux_hidden_state": MustBe((True,), "keys and values are made of the target's states")}
    HeadKeys(_OF, known, states).check(fields)
    HeadKeys(_OF, _READ, _LAYER_MUST_BE).check(layer)
    if layer.text("model_type") not in ("qwen3", "llama"):
        raise UnknownArchitectureError(
            f"{layer.where}: model_type: expected qwen3 or llama in a DFlash head, got {layer.text('model_type')!r}; "
            "use another head"
        )
    size = fields.values.get("target_hidden_size")
    if size is not None and size != layer.integer("hidden_size"):
        raise UnknownArchitectureError(
            f"{fields.where}: target_hidden_size: expected {layer.integer('hidden_size')}, the head's own, got "
            f"{size!r}; "
            "use a head of the target's width"
        )
    both_ways = fields.flag("sliding_window_non_causal", kind == "dflash2")
    rules = tuple(
        LayerRule(window or 0, slides and bool(window) and not both_ways) for window, slides in _windows(layer)
    )
    merged = Fields({**layer.values, **fields.values}, fields.where)
    return _made(
        merged,
        layers=layer_ids(fields, "aux_hidden_state_layer_ids", required=True),
        rules=rules,
        draft_vocab_size=fields.integer("draft_vocab_size", layer.integer("vocab_size")),
        block_size=fields.integer("block_size", 8, minimum=2),
        from_anchor=fields.flag("sample_from_anchor", kind == "dspark"),
    )


def _made(
    fields: Fields,
    *,
    layers: tuple[int, ...],
    rules: tuple[LayerRule, ...],
    draft_vocab_size: int,
    block_size: int,
    from_anchor: bool,
) -> DFlashConfig:
    sizes = _sizes(fields)
    mask = fields.integer("mask_token_id", minimum=0)
    if mask >= sizes.vocab_size or draft_vocab_size > sizes.vocab_size:
        raise CheckpointError(
            f"{fields.where}: expected mask_token_id below, and draft_vocab_size up to, vocab_size = "
            f"{sizes.vocab_size}, got {mask} and {draft_vocab_size}; correct the file"
        )
    variant = _variant(fields)
    if variant.get("selector_rank") and draft_vocab_size != sizes.vocab_size:
        raise UnknownArchitectureError(
            f"{fields.where}: draft_vocab_size: expected {sizes.vocab_size} for a head with a selector, got "
            f"{draft_vocab_size}; use a head of the whole vocabulary"
        )
    if variant.get("selector_top", 0) > sizes.vocab_size:
        raise CheckpointError(
            f"{fields.where}: selector_top_k: expected at most vocab_size = {sizes.vocab_size}, got "
            f"{variant['selector_top']}; correct the file"
        )
    group = variant.get("conv_group", 0)
    if group and (sizes.hidden_size % group or variant["conv_size"] > block_size):
        raise CheckpointError(
            f"{fields.where}: expected conv_group_size to divide hidden_size = {sizes.hidden_size}, and "
            f"conv_kernel_size up to block_size = {block_size}, got {group} and {variant['conv_size']}; "
            "correct the file"
        )
    cap = fields.values.get("final_logit_softcapping")
    return DFlashConfig(
        **DFlashConfig.of(sizes),
        draft_vocab_size=draft_vocab_size,
        layers=layers,
        rules=rules,
        block_size=block_size,
        mask_token=mask,
        from_anchor=from_anchor,
        **variant,
        markov=_markov(fields),
        confidence=_confidence(fields, sizes.hidden_size, variant.get("markov_rank", 0)),
        embedding_scale=fields.number("input_embedding_scale", 1.0),
        logit_scale=fields.number("output_multiplier", 1.0),
        logit_cap=fields.number("final_logit_softcapping") if cap else 0.0,
    )


def _sizes(fields: Fields) -> ModelConfig:
    """Sizes of the layers, read as a Llama's: ids of special tokens do not matter to a head."""
    special = {"eos_token_id", "pad_token_id", "bos_token_id", "tie_word_embeddings", "partial_rotary_factor"}
    keys = (STANDARD | {"attention_bias"}) - special
    values = {key: value for key, value in fields.values.items() if key in keys}
    usual = {"head_dim": 128} if fields.values.get("model_type") == "qwen3" else {}
    none = {"eos_token_id": None, "bos_token_id": None}
    return ModelConfig.from_fields(Fields({**usual, **values, **none, "model_type": "llama"}, fields.where))


def _windows(fields: Fields) -> list[tuple[int, bool]]:
    """Return the window of every layer (0: none) and whether the layer is called a sliding one, as `Qwen3Config`."""
    count = _sizes(fields).num_layers  # which is checked
    on = fields.flag("use_sliding_window", fields.values.get("model_type") not in ("qwen3", None))
    window = fields.integer("sliding_window") if on and fields.values.get("sliding_window") is not None else 0
    types = fields.values.get("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", 28, minimum=0)
        types = ["sliding_attention" if window and i >= first else "full_attention" for i in range(count)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != count or any(one not in known for one in types):
        raise UnknownArchitectureError(
            f"{fields.where}: layer_types: expected full_attention or sliding_attention for {count} layers, got "
            f"{types!r}; use another head"
        )
    slides = [one == "sliding_attention" for one in types]
    return [(window if one else 0, one) for one in slides]


def _outputs(fields: Fields, target: ModelConfig) -> tuple[int, ...]:
    """Return the streams after the layers in ``target_layer_ids``; -1 is the embedding."""
    ids = layer_ids(fields, "target_layer_ids", least=-1, required=True)
    if target.num_layers - 1 in ids:
        raise UnknownArchitectureError(
            f"{fields.where}: target_layer_ids: expected layers before the last, whose output is read after the "
            f"target's last norm and is not supported among others, got {list(ids)}; use another head"
        )
    return tuple(one + 1 for one in ids)


def _variant(fields: Fields) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, key, needs in (
        ("conv_size", "conv_kernel_size", "conv_group_size"),
        ("conv_group", "conv_group_size", "conv_kernel_size"),
        ("selector_rank", "selector_rank", "selector_top_k"),
        ("selector_top", "selector_top_k", "selector_rank"),
        ("markov_rank", "markov_rank", ""),
    ):
        if fields.values.get(key) is not None:
            found[name] = fields.integer(key, minimum=1 if needs else 0)
            if needs:
                fields.integer(needs)
    return found


def _markov(fields: Fields) -> MarkovKind:
    kind = fields.values.get("markov_head_type") or "vanilla"
    for one in ("vanilla", "gated", "rnn"):
        if kind == one:
            return one
    raise UnknownArchitectureError(
        f"{fields.where}: markov_head_type: expected vanilla, gated or rnn, got {kind!r}; use another head"
    )


def _confidence(fields: Fields, size: int, rank: int) -> int:
    """Return the width of the confidence head's input; 0 without one."""
    of_speculators = fields.values.get("speculators_model_type")
    if of_speculators not in (None, "dspark") or not fields.flag("enable_confidence_head", bool(of_speculators)):
        return 0
    return size + (rank if fields.flag("confidence_head_with_markov", True) else 0)


@dataclass(frozen=True, slots=True)
class DFlashHeadOptions:
    """The head to train; its blocks have a token more than ``k`` of `BlockTraining`."""

    layers: tuple[int, ...] = option(
        (), "Residual stream of the target to read; repeatable. Default: five, evenly spread.", names=("--aux-layers",)
    )
    draft_vocab_size: int | None = option(
        None, "Number of token ids that can be drafted. Default: the whole vocabulary."
    )
    num_layers: int = option(1, "Number of decoder layers of the head.", names=("--head-layers",))
    mask_token: int | None = option(None, "Id that stands for tokens not yet known. Default: the rarest of the data.")

    def check(self, sizes: ModelConfig) -> None:
        size, mask = sizes.vocab_size, self.mask_token
        if any(not 0 <= layer < sizes.num_layers for layer in self.layers) or self.num_layers < 1:
            raise ConfigurationError(
                f"layers: expected residual streams from 0 to {sizes.num_layers - 1} of this target, and at least one "
                f"layer of the head, got {list(self.layers)} and {self.num_layers}; correct them"
            )
        drafted = size if self.draft_vocab_size is None else self.draft_vocab_size
        if not (1 <= drafted <= size and (mask is None or 0 <= mask < size)):
            raise ConfigurationError(
                f"draft_vocab_size, mask_token: expected 1 to {sizes.vocab_size} ids, and an id below that, got "
                f"{self.draft_vocab_size} and {self.mask_token}; correct them"
            )
