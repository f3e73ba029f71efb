"""Folders of EAGLE heads: read in any known layout, written in any of them, checked tensor by tensor.

Missing and surplus tensors, wrong shapes, NaN and vocabulary maps that contradict each other are refused by name.
Pickles are read by torch's restricted unpickler. Not here: the names of the layouts (`paceline.eagle.formats`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError, ConfigurationError, MissingWeightsError, WeightShapeError
from paceline.decoder.json_fields import Fields, read_json_object
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights.atomic_write import atomic_write
from paceline.decoder.weights.files import check_finite, write_weight_file
from paceline.decoder.weights.folder import find_weight_files
from paceline.decoder.weights.open import open_weight_file
from paceline.eagle import formats
from paceline.eagle.config import CONFIG, EagleConfig
from paceline.eagle.formats import EMBEDDING, HEAD, MASK, OFFSETS


def _check_export(config: EagleConfig, layout: str, *, num_layers: int | None = None) -> None:
    """Raise unless the readers of a layout can run this head. ``num_layers``: of the target, which "nxd" asks for.

    Read of their code: EAGLE cb7e084 (eagle/model/cnets.py and cnets1.py), SGLang and vLLM
    (models/llama_eagle3.py), NxD Inference 4bcdc54 (models/model_base.py, models/llama/modeling_llama.py) and
    speculators c05b95b.

    Raises:
        ConfigurationError: they cannot, and why; or the target is not given.
    """
    if layout == "paceline":
        return
    reason = _reason(config, layout, num_layers)
    if reason:
        raise ConfigurationError(f"layout {layout!r} cannot hold this head: {reason}; keep it in layout 'paceline'")


def _reason(config: EagleConfig, layout: str, num_layers: int | None) -> str:
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
    """NxD Inference reads no d2t, and the outputs of layers 1, L/2 - 1 and L - 4: the streams before those after."""
    if config.draft_vocab_size != config.vocab_size:
        return (
            f"NxD Inference does not read d2t, and this head drafts {config.draft_vocab_size} of {config.vocab_size} "
            "ids; train one with the whole vocabulary"
        )
    if config.target_hidden_size != config.hidden_size:
        return "NxD Inference takes the width of the head for that of the target"
    if num_layers is None:
        raise ConfigurationError("layout 'nxd' depends on how many layers the target has: give the target")
    expected = (2, num_layers // 2, num_layers - 3)
    if config.layers != expected:
        return (
            f"NxD Inference reads residual streams {list(expected)} of a target with {num_layers} layers, and this "
            f"head reads {list(config.layers)}"
        )
    return ""


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A head as it was found.

    weights    by our names, in the type they are stored in; ``ids`` [U] int64 of version 3 instead of d2t and t2d
    embedding  [V, H] of its own, or None: then it borrows the target's
    """

    config: EagleConfig
    weights: dict[str, Tensor]
    embedding: Tensor | None


def load(
    folder: Path, target: ModelConfig, *, head: Tensor | None = None, aux_layers: Sequence[int] | None = None
) -> Checkpoint:
    """Read a head for this target.

    head        [V, H], the target's output layer, or its first rows, to compare a copy of it with
    aux_layers  residual streams of the target that a head of version 3 reads, in place of what its config.json says

    Raises:
        CheckpointError: what the folder holds cannot be used.
        PairingError: it is a head for another target.
        ConfigurationError: ``aux_layers`` does not fit, or is needed.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder that holds an EAGLE head")
    raw = _tensors(folder)
    fields = Fields(read_json_object(folder / CONFIG), str(folder / CONFIG))
    layout, version = formats.layout_of(fields, raw)
    tensors: dict[str, Tensor] = {}
    for name, value in raw.items():
        own_name = formats.own_name(name, layout, version)
        if own_name in tensors:
            raise CheckpointError(f"{folder} holds {own_name} twice; keep one of the two")
        if own_name is not None:
            tensors[own_name] = value
    config = formats.parse(fields, layout, version, target=target, names=tensors, override=aux_layers)
    config.check_target(target)
    embedding = tensors.pop(EMBEDDING, None)
    if version == 1:
        _same_head(folder, tensors.pop(HEAD, None), head, size=target.vocab_size)
    maps = (tensors.pop(OFFSETS, None), tensors.pop(MASK, None)) if version == 3 else (None, None)
    ids = drafted_ids(config, *maps, where=str(folder))
    _compare(folder, tensors, config.shapes())
    _check_embedding(folder, config, embedding)
    for name, value in (tensors if embedding is None else {**tensors, EMBEDDING: embedding}).items():
        check_finite(name, value, value.dtype, where=folder)
    return Checkpoint(config, tensors | ({"ids": ids} if version == 3 else {}), embedding)


@dataclass(frozen=True, slots=True)
class TargetTensors:
    """What a target adds to a head that is written in the layout "nxd", and what is asked of it there.

    embedding   [V, H]
    head        [V, H], the output layer
    num_layers  how many layers it has
    """

    embedding: Tensor
    head: Tensor
    num_layers: int


def save(
    folder: Path,
    checkpoint: Checkpoint,
    *,
    layout: str = "paceline",
    target: TargetTensors | None = None,
    base: str = "",
) -> Path:
    """Write a head, with its config.json; the file of weights.

    ``target`` is needed for layout "nxd", which holds copies of its embedding and, in version 1, of its output layer.
    ``base`` says where the target came from, which layout "speculators" wants to know.

    Raises:
        ConfigurationError: the layout is unknown, or its readers cannot run this head (`_check_export`).
    """
    config, version = checkpoint.config, checkpoint.config.version
    facts = formats.written(config, layout, base=base)
    if layout == "nxd" and target is None:
        raise ConfigurationError("layout 'nxd' holds the target's embedding and output layer: give the target")
    _check_export(config, layout, num_layers=None if target is None else target.num_layers)
    tensors, embedding = dict(checkpoint.weights), checkpoint.embedding
    if version == 3:
        ids = tensors.pop("ids").to(torch.int64)
        if layout == "nxd":  # drafts the whole vocabulary, in its own order
            tensors[HEAD] = tensors[HEAD][ids.argsort()]
        else:
            tensors[OFFSETS] = ids - torch.arange(len(ids))
            tensors[MASK] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    if layout == "nxd" and target is not None:
        embedding = target.embedding if embedding is None else embedding
        if version == 1:
            tensors[HEAD] = target.head
    if embedding is not None:
        tensors[EMBEDDING] = embedding
    renamed = {formats.foreign_name(name, layout, version): x.detach().clone() for name, x in tensors.items()}
    path = folder / "model.safetensors"
    write_weight_file(path, renamed)
    if layout == "paceline":
        config.write(folder)
    else:
        with atomic_write(folder / CONFIG):
            (folder / CONFIG).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return path


def convert(
    source: Path, out: Path, target: ModelConfig, *, layout: str, tensors: TargetTensors | None = None, base: str = ""
) -> Checkpoint:
    """Read a head in any layout and write it in another; see `load` and `save`."""
    checkpoint = load(source, target, head=None if tensors is None else tensors.head)
    save(out, checkpoint, layout=layout, target=tensors, base=base)
    return checkpoint


def drafted_ids(config: EagleConfig, offsets: Tensor | None, mask: Tensor | None, *, where: str) -> Tensor:
    """The target's id of every id that can be drafted, [U] int64, from d2t [U] (offsets) and t2d [V].

    Raises:
        CheckpointError: they are missing, no whole numbers, contradict each other, or leave the vocabulary.
    """
    count, every = config.draft_vocab_size, config.vocab_size
    for name, value in ((OFFSETS, offsets), (MASK, mask)):
        if value is not None and value.dtype not in _WHOLE:  # bfloat16 has no whole numbers between 256 and 258
            raise CheckpointError(
                f"{where}: {name} is stored as {value.dtype}, and ids must be whole numbers; fetch the checkpoint again"
            )
    if offsets is None:
        if count != every:
            raise MissingWeightsError(
                f"{where} drafts {count} of {every} ids and lacks {OFFSETS}, which says which; fetch it in full"
            )
        offsets = torch.zeros(count, dtype=torch.int64)
    if offsets.shape != (count,):
        raise WeightShapeError(f"{where}: {OFFSETS} has shape {list(offsets.shape)}, but must be [{count}]")
    ids = offsets.to(torch.int64) + torch.arange(count)
    if bool((ids < 0).any()) or bool((ids >= every).any()) or len(ids.unique()) != count:
        raise CheckpointError(
            f"{where}: {OFFSETS} holds no offsets: id + d2t[id] must be {count} different ids below {every}"
        )
    if mask is not None:
        if mask.shape != (every,):
            raise WeightShapeError(f"{where}: {MASK} has shape {list(mask.shape)}, but must be [{every}]")
        if not torch.equal(mask.nonzero().flatten(), ids.sort().values):
            raise CheckpointError(f"{where}: {MASK} and {OFFSETS} name different ids; fetch the checkpoint again")
    return ids


def _tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in find_weight_files(folder):
        with open_weight_file(file) as source:
            for name in source.infos():
                if name in tensors:
                    raise CheckpointError(f"{name} is in two files of {folder}; fetch the checkpoint again")
                tensors[name] = source.read(name).clone()
    return tensors


def _compare(folder: Path, tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    missing = sorted(set(shapes) - set(tensors))
    if missing == [HEAD]:
        raise MissingWeightsError(
            f"{folder} lacks {HEAD}: it shares the target's output layer, which is not supported in version 3, or is "
            "not complete; use a head with an output layer of its own"
        )
    if missing:
        raise MissingWeightsError(
            f"{folder} lacks {', '.join(missing[:4])}; fetch it in full, with its own config.json"
        )
    surplus = sorted(set(tensors) - set(shapes))
    if surplus:
        raise CheckpointError(
            f"{folder} holds tensors that an EAGLE head with this config.json does not use: {', '.join(surplus[:4])}"
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise WeightShapeError(
                f"{folder}: {name} has shape {list(tensors[name].shape)}, but its config.json and the target ask for "
                f"{list(shape)}; use the config.json and the target that belong to it"
            )


def _same_head(folder: Path, copy: Tensor | None, head: Tensor | None, *, size: int) -> None:
    if copy is None or head is None:
        return
    alike = copy.shape == (size, head.shape[1])
    if not alike or not torch.allclose(copy[: len(head)].float(), head.float(), rtol=1e-2, atol=1e-3):
        raise CheckpointError(
            f"{folder}: {HEAD} is not the target's output layer, which a head of version 1 shares; "
            "use the head that was made for this target"
        )


def _check_embedding(folder: Path, config: EagleConfig, embedding: Tensor | None) -> None:
    shape = (config.vocab_size, config.hidden_size)
    if embedding is None:
        if config.hidden_size != config.target_hidden_size:
            raise MissingWeightsError(f"{folder} lacks {EMBEDDING}; a head of another width cannot borrow the target's")
    elif tuple(embedding.shape) != shape:
        raise WeightShapeError(f"{folder}: {EMBEDDING} has shape {list(embedding.shape)}, but must be {list(shape)}")
