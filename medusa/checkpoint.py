"""Folders and files of Medusa heads: read in any known layout, written in one of them.

Tensors decide what the heads are; config.json is compared with them. Pickles are read by torch's restricted unpickler.
Not here: the names of the layouts (`paceline.medusa.formats`), and the target the heads are for.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError, ConfigurationError, MissingWeightsError, WeightShapeError
from paceline.decoder.parallel.collectives import Collectives
from paceline.decoder.weights.files import TensorInfo, WeightFile, check_finite, open_weight_file, write_weight_file
from paceline.decoder.weights.folder import find_weight_files
from paceline.decoder.weights.quantize import MatrixLike
from paceline.medusa import formats
from paceline.medusa.config import CONFIG, Claims, MedusaConfig
from paceline.medusa.network import Heads

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
        formats.canonical(())  # says what a head would be called
    config = replace(formats.survey(shapes, vocab_size=vocab_size), base=claims.base)
    _compare(folder, claims, config)
    _check(folder, config, weights)
    if formats.shared(config, weights):
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
    tensors = {name: x.contiguous() for name, x in formats.renamed(config, weights, layout).items()}
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
        weights = formats.untied(config, weights, output.to(next(iter(weights.values())).dtype))
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
        return formats.canonical(infos)
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
