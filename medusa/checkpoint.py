"""Folders and files of Medusa heads: read in any known layout, written in one of them.

Tensors decide what the heads are; config.json is compared with them. Pickles are read by torch's restricted unpickler.

    ours      heads.0.blocks.0.weight  heads.0.blocks.0.bias  heads.0.projection.weight
    medusa    0.0.linear.weight        0.0.linear.bias        0.1.weight      (also behind `medusa_head.`)
    nxd       medusa_head_0.0.linear.weight                   medusa_head_0.1.weight

Medusa's own code builds the n blocks of a head by repeating one module (`[ResBlock] * n`), so its checkpoints hold n
equal copies, and loading n unlike blocks into it keeps only the last. `shared` recognises the first; writing the
second in a layout whose readers do that is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError, ConfigurationError, MissingWeightsError, WeightShapeError
from paceline.decoder.parallel.collectives import Collectives
from paceline.decoder.weights.files import TensorInfo, WeightFile, check_finite, write_weight_file
from paceline.decoder.weights.folder import find_weight_files
from paceline.decoder.weights.open import open_weight_file
from paceline.decoder.weights.quantize import MatrixLike
from paceline.medusa.config import CONFIG, Claims, MedusaConfig
from paceline.medusa.network import Heads

LAYOUTS = ("paceline", "medusa", "nxd")
_OURS = re.compile(r"heads\.(\d+)\.(?:blocks\.(\d+)\.(weight|bias)|projection\.weight)")
_THEIRS = re.compile(r"(?:.*\b)?medusa_head(?:\.|s\.|_)(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")
_BARE = re.compile(r"(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")
_VLLM = re.compile(r"blocks\.\d+\.layers\.\d+\..+|lm_heads\.\d+\..+|token_map")
_PART = re.compile(r"(?:(?:.*\b)?medusa_head(?:\.|s\.|_)|heads\.)?\d+\..+")  # of a head, known or not


def canonical(names: Iterable[str]) -> dict[str, str]:
    """Our name -> the name in the file, for every tensor of Medusa heads among ``names``.

    Other tensors (a file may hold a whole model) are passed over.

    Raises:
        CheckpointError: two names mean the same tensor, or a head has a part that heads here do not have.
        MissingWeightsError: there are no Medusa heads.
    """
    sources: dict[str, str] = {}
    for name in names:
        own_name = _ours(name)
        if _VLLM.fullmatch(name):
            raise CheckpointError(
                f"{name} is a name of vLLM's own layout of Medusa heads, which is not supported; use the checkpoint "
                "that it was made from"
            )
        if own_name is None and _PART.fullmatch(name):
            raise CheckpointError(
                f"{name} belongs to a Medusa head, and heads here have no such part: they are residual blocks and a "
                "projection without a bias; use heads of that kind"
            )
        if own_name is None:
            continue
        if own_name in sources:
            raise CheckpointError(f"{sources[own_name]} and {name} are both {own_name}; keep one layout in one file")
        sources[own_name] = name
    if not sources:
        raise MissingWeightsError(
            "no tensor has the name of a Medusa head: neither 0.0.linear.weight (Medusa), nor "
            "medusa_head_0.0.linear.weight (NxD Inference), nor heads.0.blocks.0.weight (ours); give the file "
            "with the heads"
        )
    return sources


def _ours(name: str) -> str | None:
    if _OURS.fullmatch(name):
        return name
    match = _THEIRS.fullmatch(name) or _BARE.fullmatch(name)
    if match is None:
        return None
    head, place, kind = match.groups()
    # A projection is what stands last, without a module called `linear` in it.
    if ".linear." in name:
        return f"heads.{head}.blocks.{place}.{kind}"
    return f"heads.{head}.projection.weight" if kind == "weight" else None


def survey(shapes: Mapping[str, tuple[int, ...]], *, vocab_size: int) -> MedusaConfig:
    """The configuration that tensors of our names have among them; ``vocab_size`` counts for heads that are tied.

    Raises:
        MissingWeightsError: a head or a block is left out.
        WeightShapeError: a tensor has no dimensions.
    """
    blocks: dict[int, set[int]] = {}
    projections: dict[int, tuple[int, ...]] = {}
    width = 0
    for name, shape in shapes.items():
        match = _OURS.fullmatch(name)
        assert match is not None, "names are ours by now"
        if not shape:
            raise WeightShapeError(f"{name} of the Medusa heads is a single number; take the checkpoint again")
        head = int(match[1])
        blocks.setdefault(head, set())
        width = shape[-1]
        if match[2] is None:
            projections[head] = shape
        else:
            blocks[head].add(int(match[2]))
    heads = max(blocks) + 1
    absent = sorted(set(range(heads)) - set(blocks))
    if absent:
        raise MissingWeightsError(f"head {absent[0]} of {heads} Medusa heads is absent; take the checkpoint in full")
    layers = max((len(indices) for indices in blocks.values()), default=0)
    uneven = [head for head, indices in blocks.items() if indices != set(range(layers))]
    if uneven or (projections and len(projections) != heads):
        head = uneven[0] if uneven else min(set(range(heads)) - set(projections))
        raise MissingWeightsError(
            f"head {head} of {heads} lacks a block or a projection that others have; take the checkpoint in full"
        )
    size = next(iter(projections.values()))[0] if projections else vocab_size
    return MedusaConfig(heads, layers, width, size, tied=not projections)


def shared(config: MedusaConfig, weights: Mapping[str, Tensor]) -> bool:
    """Whether the blocks of every head are copies of one block, as in files from Medusa's own code. False for one."""
    if config.layers < 2:
        return False
    return all(
        torch.equal(weights[f"heads.{head}.blocks.0.{kind}"], weights[f"heads.{head}.blocks.{layer}.{kind}"])
        for head in range(config.heads)
        for layer in range(1, config.layers)
        for kind in ("weight", "bias")
    )


def renamed(config: MedusaConfig, weights: Mapping[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Weights by our names -> by the names of a layout.

    Raises:
        ConfigurationError: the layout is unknown, or its readers would load these heads as others.
    """
    if layout not in LAYOUTS:
        raise ConfigurationError(f"layout={layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
    if layout == "paceline":
        return dict(weights)
    if layout == "nxd" and (config.tied or config.layers != 1):
        raise ConfigurationError(
            "NxD Inference reads heads of one block and a projection of their own; convert with the target given, "
            "so that tied heads get copies of its output layer, and train with one layer"
        )
    if config.layers > 1 and not shared(config, weights):
        raise ConfigurationError(
            f"Medusa's own code repeats one block {config.layers} times and would load only the last of these unlike "
            "blocks into it; keep our layout, or train heads with one layer"
        )
    prefix = "medusa_head_" if layout == "nxd" else ""
    tensors: dict[str, Tensor] = {}
    for head in range(config.heads):
        for layer in range(config.layers):
            for kind in ("weight", "bias"):
                tensors[f"{prefix}{head}.{layer}.linear.{kind}"] = weights[f"heads.{head}.blocks.{layer}.{kind}"]
        if not config.tied:
            tensors[f"{prefix}{head}.{config.layers}.weight"] = weights[f"heads.{head}.projection.weight"]
    return tensors


def untied(config: MedusaConfig, weights: Mapping[str, Tensor], output: Tensor) -> dict[str, Tensor]:
    """The same heads with a copy of the target's output layer [V, H] each. Weights that have their own stay."""
    copies = {f"heads.{head}.projection.weight": output.clone() for head in range(config.heads)} if config.tied else {}
    return {**weights, **copies}


log = logging.getLogger("paceline")

# NxD Inference reads medusa_heads.pt from the folder of the target, and no other file.
FILES = {"paceline": "model.safetensors", "medusa": "medusa_lm_head.pt", "nxd": "medusa_heads.pt"}
_NAMES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "medusa_heads.pt")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Heads as they were found: weights by our names, in the type they are stored in."""

    config: MedusaConfig
    weights: dict[str, Tensor]


def load(folder: Path, *, vocab_size: int) -> Checkpoint:
    """Read heads from a folder; ``vocab_size`` is that of the target, for heads that use its output layer.

    Raises:
        CheckpointError: there is no such folder, or what it holds cannot be used.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder that holds the Medusa heads")
    claims = Claims.read(folder) if (folder / CONFIG).is_file() else Claims(None, None, "", None)
    weights: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(folder):
        with open_weight_file(file) as source:
            infos = source.infos()
            for own_name, name in _names(infos).items():
                if own_name in weights:
                    raise CheckpointError(f"{folder} holds {own_name} twice; keep one file with the heads")
                shapes[own_name] = infos[name].shape
                weights[own_name] = _read(source, name)
    if not weights:
        canonical(())  # says what a head would be called
    config = replace(survey(shapes, vocab_size=vocab_size), base=claims.base)
    _compare(folder, claims, config)
    _check(folder, config, weights)
    if shared(config, weights):
        log.info("%s: every head repeats one block %d times, as Medusa's own code does", folder, config.layers)
    return Checkpoint(config, weights)


def heads(
    folder: Path,
    output: MatrixLike,
    dtype: torch.dtype,
    *,
    vocab_size: int | None = None,
    group: Collectives | None = None,
    ids: Tensor | None = None,
) -> Heads:
    """Heads from a folder, ready to use with a target whose output layer [V, H] this is. Raises as `load`.

    Of a target divided over ``group``, ``output`` is this rank's part, of the ids ``ids``, and V must be said.
    """
    checkpoint = load(folder, vocab_size=vocab_size or output.shape[0])
    network = Heads(checkpoint.config, output, dtype, group=group, ids=ids)
    network.fill(checkpoint.weights)
    return network


def save(folder: Path, config: MedusaConfig, weights: dict[str, Tensor], *, layout: str = "paceline") -> Path:
    """Write heads, with their config.json. Returns the file of weights.

    Raises:
        ConfigurationError: the layout is unknown or cannot hold these heads, or `check_place`.
    """
    tensors = {name: x.contiguous() for name, x in renamed(config, weights, layout).items()}
    check_place(folder, layout)
    path = folder / FILES[layout]
    write_weight_file(path, tensors)
    config.write(folder)
    return path


def check_place(folder: Path, layout: str = "paceline") -> None:
    """Raise ConfigurationError if a folder holds heads that would be read in place of those to be written there."""
    order = (*_NAMES, FILES["paceline"])
    before = [name for name in order[: order.index(FILES[layout])] if (folder / name).is_file()]
    if before:
        raise ConfigurationError(
            f"{folder} holds other heads in {before[0]}, which would be read instead of those written there; remove "
            "that file, or give another folder"
        )


def convert(source: Path, out: Path, *, layout: str, output: Tensor, dtype: torch.dtype | None = None) -> Path:
    """Read heads in any layout and write them in ``layout``. ``output`` [V, H] is the target's output layer.

    Layouts of other projects get heads with projections of their own: copies of the output layer where they were tied.
    ``dtype``: number format to store; None keeps what is there.
    """
    checkpoint = load(source, vocab_size=output.shape[0])
    config, weights = checkpoint.config, checkpoint.weights
    if layout != "paceline":
        weights = untied(config, weights, output.to(next(iter(weights.values())).dtype))
        config = replace(config, tied=False)
    return save(
        out, config, {n: check_finite(n, x, dtype or x.dtype, where=source) for n, x in weights.items()}, layout=layout
    )


def _files(folder: Path) -> list[Path]:
    """The file with the heads alone, if there is one, or all files of the checkpoint."""
    files = [folder / name for name in _NAMES if (folder / name).is_file()]
    return files[:1] or find_weight_files(folder)


def _names(infos: dict[str, TensorInfo]) -> dict[str, str]:
    """Heads among the tensors of one file; a shard may well hold none."""
    try:
        return canonical(infos)
    except MissingWeightsError:
        return {}


def _read(source: WeightFile, name: str) -> Tensor:
    return source.read(name).clone()  # the file may change or go afterwards


def _check(folder: Path, config: MedusaConfig, weights: dict[str, Tensor]) -> None:
    """Every tensor against the sizes that the others speak of, its type and its numbers."""
    for name, shape in config.shapes().items():
        if name not in weights:
            raise MissingWeightsError(f"{folder} lacks {name}; take the checkpoint in full")
        if tuple(weights[name].shape) != shape:
            raise WeightShapeError(
                f"{folder}: {name} has shape {list(weights[name].shape)}, and must have {list(shape)} like those of "
                "the other heads; take the checkpoint again"
            )
        check_finite(name, weights[name], weights[name].dtype, where=folder)


def _compare(folder: Path, claims: Claims, config: MedusaConfig) -> None:
    """What config.json says against what is there."""
    if claims.heads is not None and claims.heads > config.heads:
        raise MissingWeightsError(
            f"{folder}/{CONFIG} says medusa_num_heads = {claims.heads}, and there are {config.heads} heads; take the "
            "checkpoint in full, or correct the file"
        )
    if claims.heads is not None and claims.heads < config.heads:
        # Published files say 2 and hold 5: Medusa's own loader overrides the number.
        log.info("%s says %d heads and holds %d; all are used", folder, claims.heads, config.heads)
    if claims.layers is not None and claims.layers != config.layers:
        raise MissingWeightsError(
            f"{folder}/{CONFIG} says medusa_num_layers = {claims.layers}, and the heads have {config.layers}; take the "
            "checkpoint in full, or correct the file"
        )
    if claims.tied is False and config.tied:
        raise MissingWeightsError(f"{folder} lacks the projections that its {CONFIG} speaks of; take it in full")
