"""Folders of EAGLE heads: read in any known layout, written in any of them, checked tensor by tensor. Names of the
layouts are in `paceline.eagle.formats`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError, ConfigurationError, MissingWeightsError
from paceline.decoder.models.config import ModelConfig
from paceline.eagle import formats
from paceline.eagle.config import EagleConfig
from paceline.eagle.formats import EMBEDDING, HEAD, MASK, MASKED, OFFSETS
from paceline.heads import layouts
from paceline.heads.checkpoint import Checkpoint, DraftVocab, check, drafted_ids, read, write
from paceline.heads.layouts import read_config


def _check_export(config: EagleConfig, layout: str, *, num_layers: int | None = None) -> None:
    """Raise ConfigurationError unless the readers of a layout can run this head. ``num_layers``: of the target, for
    "nxd".

    Sources, the readers' code: EAGLE cb7e084 (eagle/model/cnets.py and cnets1.py), SGLang and vLLM
    (models/llama_eagle3.py), NxD Inference 4bcdc54 (models/model_base.py, models/llama/modeling_llama.py) and
    speculators c05b95b.
    """
    if layout == "paceline":
        return
    reason = _reason(config, layout, num_layers)
    if reason:
        raise ConfigurationError(f"layout: {layout!r} cannot store this head ({reason}); use layout='paceline'")


def _reason(config: EagleConfig, layout: str, num_layers: int | None) -> str:
    if config.shares_output:
        return "it shares the target's output layer"
    if layout != "speculators" and (later := config.of_version_3()):
        return f"it has {later[0]}, which only speculators' readers know"
    if config.qk_norm and config.mlp_bias:
        return "it has qk_norm and mlp_bias, and a layer of Qwen3 has no biases there"
    if config.norm_before_residual and layout != "speculators":
        return "it has norm_before_residual, which only speculators' readers know"
    if config.input_norm and layout != "nxd":
        return "its layer normalises what it reads, which in version 1 only NxD Inference does"
    if layout == "eagle" and (config.attention_bias or config.mlp_bias):
        return "its layer has biases, which EAGLE's own code and SGLang leave out"
    if config.version == 1:
        return ""
    if layout in ("eagle", "speculators") and config.layers[0] == 1:
        return (
            f"it reads residual streams {list(config.layers)}, and SGLang takes ids that begin with 1 for the outputs "
            "of these layers, vLLM does not"
        )
    if layout in ("eagle", "nxd") and len(config.layers) != 3:
        return f"it reads {len(config.layers)} residual streams of the target, and readers of this layout three"
    return _nxd_reason(config, num_layers) if layout == "nxd" else ""


def _nxd_reason(config: EagleConfig, num_layers: int | None) -> str:
    """Return why NxD Inference cannot run a head: no d2t, and the outputs of layers 1, L/2 - 1 and L - 4 (the streams
    before their successors).
    """
    if config.draft_vocab_size != config.vocab_size:
        return (
            f"NxD Inference does not read d2t, and this head drafts {config.draft_vocab_size} of {config.vocab_size} "
            "ids; train one with the whole vocabulary"
        )
    if config.target_hidden_size != config.hidden_size:
        return "NxD Inference takes the width of the head for that of the target"
    if num_layers is None:
        raise ConfigurationError(
            "target: expected the target's folder for layout='nxd', whose names depend on its number of layers, got "
            "none; give the target"
        )
    expected = (2, num_layers // 2, num_layers - 3)
    if config.layers != expected:
        return (
            f"NxD Inference reads residual streams {list(expected)} of a target with {num_layers} layers, and this "
            f"head reads {list(config.layers)}"
        )
    return ""


Head = Checkpoint[EagleConfig]
"""A head as read from a checkpoint; version 3 has ``ids`` [U] int64 instead of d2t and t2d."""


def load(
    folder: Path, target: ModelConfig, *, head: Tensor | None = None, aux_layers: Sequence[int] | None = None
) -> Head:
    """Read a head for this target.

    head        [V, H], the target's output layer, or its first rows, to compare with a copy in the checkpoint
    aux_layers  residual streams of the target that a head of version 3 reads, in place of its config.json's

    Raises:
        CheckpointError: the folder's contents cannot be used.
        PairingError: it is a head for another target.
        ConfigurationError: ``aux_layers`` does not fit, or is needed.
    """
    raw, fields = read(folder), read_config(folder)
    layout, version = formats.layout_of(fields, raw)
    own = layouts.sources({name: formats.own_name(name, layout, version) for name in raw})
    tensors = {name: raw[source] for name, source in own.items()}
    config = formats.parse(fields, layout, version, target=target, names=tensors, override=aux_layers)
    config.check_target(target)
    embedding = tensors.pop(EMBEDDING, None)
    if MASKED in tensors:  # stored with one or two dimensions of size 1 before it
        tensors[MASKED] = tensors[MASKED].flatten()
    if version == 1:
        _same_head(folder, tensors.pop(HEAD, None), head, size=target.vocab_size)
    maps = (tensors.pop(OFFSETS, None), tensors.pop(MASK, None)) if version == 3 else (None, None)
    ids = drafted_ids((config.draft_vocab_size, config.vocab_size), *maps, where=str(folder))
    if config.shares_output and not torch.equal(ids, torch.arange(config.vocab_size)):
        raise CheckpointError(
            f"{folder}: expected no {OFFSETS} in a head that shares the target's output layer, got one that changes "
            "ids; download the checkpoint in full"
        )
    shapes = config.shapes()
    if embedding is not None:
        tensors[EMBEDDING], shapes[EMBEDDING] = embedding, (config.vocab_size, config.hidden_size)
    elif config.hidden_size != config.target_hidden_size:
        raise MissingWeightsError(
            f"{folder}: expected the tensor {EMBEDDING}, since a head of another width cannot share the target's, "
            "got none; download the checkpoint in full"
        )
    check(folder, tensors, shapes)
    tensors.pop(EMBEDDING, None)
    return Checkpoint(config, tensors | ({"ids": ids} if version == 3 else {}), embedding)


@dataclass(frozen=True, slots=True)
class TargetTensors:
    """Additions of the layout "nxd" to a head: ``embedding`` and ``head`` (output layer) [V, H] of the target, and its
    number of layers.
    """

    embedding: Tensor
    head: Tensor
    num_layers: int


def save(
    folder: Path,
    checkpoint: Head,
    *,
    layout: str = "paceline",
    target: TargetTensors | None = None,
    base: str = "",
) -> Path:
    """Write a head, with its config.json; return the file of weights. ConfigurationError: the layout is unknown, or its
    readers cannot run this head.

    target  for layout "nxd", which holds copies of its embedding and, in version 1, of its output layer
    base    name or path of the target, stored by layout "speculators"
    """
    config, version = checkpoint.config, checkpoint.config.version
    facts = formats.written(config, layout, base=base)
    if layout == "nxd" and target is None:
        raise ConfigurationError(
            "target: expected the target's folder for layout='nxd', which stores its embedding and output layer, "
            "got none; give the target"
        )
    _check_export(config, layout, num_layers=None if target is None else target.num_layers)
    tensors, embedding = dict(checkpoint.weights), checkpoint.embedding
    if version == 3:
        ids = tensors.pop("ids").to(torch.int64)
        if layout == "nxd":  # drafts the whole vocabulary, in the target's order
            tensors[HEAD] = tensors[HEAD][ids.argsort()]
        else:
            vocabulary = DraftVocab(ids, config.vocab_size)
            tensors[OFFSETS], tensors[MASK] = vocabulary.offsets, vocabulary.mask
    if config.mask_token is not None and layout != "paceline":
        tensors[MASKED] = tensors[MASKED].view(1, 1, -1)
    if layout == "nxd" and target is not None:
        embedding = target.embedding if embedding is None else embedding
        if version == 1:
            tensors[HEAD] = target.head
    if embedding is not None:
        tensors[EMBEDDING] = embedding
    renamed = {formats.foreign_name(name, layout, version): x for name, x in tensors.items()}
    return write(folder / "model.safetensors", renamed, facts)


def convert(
    source: Path, out: Path, target: ModelConfig, *, layout: str, tensors: TargetTensors | None = None, base: str = ""
) -> Head:
    checkpoint = load(source, target, head=None if tensors is None else tensors.head)
    save(out, checkpoint, layout=layout, target=tensors, base=base)
    return checkpoint


def _same_head(folder: Path, copy: Tensor | None, head: Tensor | None, *, size: int) -> None:
    if copy is None or head is None:
        return
    alike = copy.shape == (size, head.shape[1])
    if not alike or not torch.allclose(copy[: len(head)].float(), head.float(), rtol=1e-2, atol=1e-3):
        raise CheckpointError(
            f"{folder}: expected {HEAD} equal to the target's output layer, which a version-1 head shares, got "
            "another tensor; use the head that was made for this target"
        )
