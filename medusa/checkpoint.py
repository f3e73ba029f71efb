"""Folders and files of Medusa heads: read in any known layout, written in one of them.

Tensors decide what the heads are; config.json is compared with them. Pickles are read by torch's restricted unpickler.

    ours      heads.0.blocks.0.weight  heads.0.blocks.0.bias  heads.0.projection.weight
    medusa    0.0.linear.weight        0.0.linear.bias        0.1.weight      (also after `medusa_head.`)
    nxd       medusa_head_0.0.linear.weight                   medusa_head_0.1.weight

Medusa's own code builds the n blocks of a head by repeating one module (`[ResBlock] * n`), so its checkpoints hold n
equal copies, and loading n different blocks into it keeps only the last. `shared` recognises the former; writing the
latter in a layout whose readers do that is rejected.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError, ConfigurationError, MissingWeightsError, WeightShapeError
from paceline.decoder.parallel.collectives import Collectives
from paceline.decoder.weights.files import check_finite
from paceline.decoder.weights.quantize import MatrixLike
from paceline.heads import layouts
from paceline.heads.checkpoint import Checkpoint, check, read, write
from paceline.heads.layouts import CONFIG
from paceline.medusa.config import Claims, MedusaConfig
from paceline.medusa.network import Heads

LAYOUTS = ("paceline", "medusa", "nxd")
_OURS = re.compile(r"heads\.(\d+)\.(?:blocks\.(\d+)\.(weight|bias)|projection\.weight)")
_THEIRS = re.compile(r"(?:.*\b)?medusa_head(?:\.|s\.|_)(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")
_BARE = re.compile(r"(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")
_VLLM = re.compile(r"blocks\.\d+\.layers\.\d+\..+|lm_heads\.\d+\..+|token_map")
_PART = re.compile(r"(?:(?:.*\b)?medusa_head(?:\.|s\.|_)|heads\.)?\d+\..+")  # tensors of a head, known or not


def canonical(names: Iterable[str]) -> dict[str, str]:
    """Map our name to the name in the file, for every tensor of Medusa heads among ``names``; others are ignored (a
    file may hold a whole model).
    """
    own_names = {}
    for name in names:
        own_names[name] = own_name = _ours(name)
        if _VLLM.fullmatch(name):
            raise CheckpointError(
                f"weights: {name} belongs to vLLM's layout of Medusa heads, which is not supported; use the "
                "checkpoint that it was converted from"
            )
        if own_name is None and _PART.fullmatch(name):
            raise CheckpointError(
                f"weights: expected residual blocks and a projection without a bias, got {name}; use Medusa heads "
                "of that kind"
            )
    sources = layouts.sources(own_names)
    if not sources:
        raise MissingWeightsError(
            "weights: expected a tensor of a Medusa head (0.0.linear.weight of Medusa, "
            "medusa_head_0.0.linear.weight of NxD Inference or heads.0.blocks.0.weight of Paceline), got none; give "
            "the file that contains the heads"
        )
    return sources


def _ours(name: str) -> str | None:
    if _OURS.fullmatch(name):
        return name
    match = _THEIRS.fullmatch(name) or _BARE.fullmatch(name)
    if match is None:
        return None
    head, place, kind = match.groups()
    # A projection is last, without a module called `linear`.
    if ".linear." in name:
        return f"heads.{head}.blocks.{place}.{kind}"
    return f"heads.{head}.projection.weight" if kind == "weight" else None


def survey(shapes: Mapping[str, tuple[int, ...]], *, vocab_size: int) -> MedusaConfig:
    """Return the configuration of tensors with our names; ``vocab_size`` is used for tied heads."""
    blocks: dict[int, set[int]] = {}
    projections: dict[int, tuple[int, ...]] = {}
    width = 0
    for name, shape in shapes.items():
        match = _OURS.fullmatch(name)
        assert match is not None, "names are ours by now"
        if not shape:
            raise WeightShapeError(
                f"weights: {name}: expected a matrix, got a single number; download the checkpoint again"
            )
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
        raise MissingWeightsError(
            f"weights: expected {heads} Medusa heads, got none with number {absent[0]}; download the checkpoint in full"
        )
    layers = max((len(indices) for indices in blocks.values()), default=0)
    uneven = [head for head, indices in blocks.items() if indices != set(range(layers))]
    if uneven or (projections and len(projections) != heads):
        head = uneven[0] if uneven else min(set(range(heads)) - set(projections))
        raise MissingWeightsError(
            f"weights: expected the same blocks and projection in all {heads} Medusa heads, got fewer in head "
            f"{head}; download the checkpoint in full"
        )
    size = next(iter(projections.values()))[0] if projections else vocab_size
    return MedusaConfig(heads, layers, width, size, tied=not projections)


def shared(config: MedusaConfig, weights: Mapping[str, Tensor]) -> bool:
    """Return whether the blocks of every head are copies of one, as in files from Medusa's own code. False for one."""
    if config.layers < 2:
        return False
    return all(
        torch.equal(weights[f"heads.{head}.blocks.0.{kind}"], weights[f"heads.{head}.blocks.{layer}.{kind}"])
        for head in range(config.heads)
        for layer in range(1, config.layers)
        for kind in ("weight", "bias")
    )


def renamed(config: MedusaConfig, weights: Mapping[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Rename weights from our names to those of a layout; ConfigurationError: its readers would load others."""
    layouts.check_layout(layout, LAYOUTS)
    if layout == "paceline":
        return dict(weights)
    if layout == "nxd" and (config.tied or config.layers != 1):
        raise ConfigurationError(
            "layout: NxD Inference expects heads with one block and their own projection; convert with the target "
            "given, so that tied heads get copies of its output layer, and train with layers=1"
        )
    if config.layers > 1 and not shared(config, weights):
        raise ConfigurationError(
            f"layout: Medusa's own code repeats one block {config.layers} times, so it would load only the last of "
            "these different blocks; keep Paceline's layout, or train with layers=1"
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
    """Return the heads with a copy of the target's output layer [V, H] each. Weights with their own are unchanged."""
    copies = {f"heads.{head}.projection.weight": output.clone() for head in range(config.heads)} if config.tied else {}
    return {**weights, **copies}


log = logging.getLogger("paceline")

# NxD Inference reads medusa_heads.pt from the folder of the target, and no other file.
FILES = {"paceline": "model.safetensors", "medusa": "medusa_lm_head.pt", "nxd": "medusa_heads.pt"}
_NAMES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "medusa_heads.pt")


def load(folder: Path, *, vocab_size: int) -> Checkpoint[MedusaConfig]:
    """Read heads from a folder; ``vocab_size`` is that of the target, for heads with its output layer. CheckpointError:
    the folder cannot be used.
    """
    claims = Claims.read(folder) if (folder / CONFIG).is_file() else Claims(None, None, "", None)
    files = [folder / name for name in _NAMES if (folder / name).is_file()]  # files with only the heads
    raw = read(folder, files[:1], lambda name: any(one.fullmatch(name) for one in (_OURS, _VLLM, _PART)))
    weights = {own_name: raw[name] for own_name, name in canonical(raw).items()}
    config = survey({name: tuple(x.shape) for name, x in weights.items()}, vocab_size=vocab_size)
    config = replace(config, base=claims.base)
    _compare(folder, claims, config)
    check(folder, weights, config.shapes())
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
    """Load heads from a folder for a target with the output layer [V, H] ``output``. Raises as `load`.

    For a target sharded over ``group``, ``output`` is this rank's part, of the ids ``ids``, and V is required.
    """
    checkpoint = load(folder, vocab_size=vocab_size or output.shape[0])
    network = Heads(checkpoint.config, output, dtype, group=group, ids=ids)
    network.fill(checkpoint.weights)
    return network


def save(folder: Path, config: MedusaConfig, weights: dict[str, Tensor], *, layout: str = "paceline") -> Path:
    """Write heads, with their config.json; return the file of weights."""
    tensors = renamed(config, weights, layout)
    check_place(folder, layout)
    return write(folder / FILES[layout], tensors, config.written())


def check_place(folder: Path, layout: str = "paceline") -> None:
    """Raise ConfigurationError if a folder holds heads that would be read in place of those to be written."""
    order = (*_NAMES, FILES["paceline"])
    before = [name for name in order[: order.index(FILES[layout])] if (folder / name).is_file()]
    if before:
        raise ConfigurationError(
            f"{folder}: expected a folder without other heads, got {before[0]}, which would be loaded instead; "
            "remove that file, or give another folder"
        )


def convert(source: Path, out: Path, *, layout: str, output: Tensor, dtype: torch.dtype | None = None) -> Path:
    """Read heads in any layout and write them in ``layout``. ``output`` [V, H] is the target's output layer.

    Layouts of other projects get copies of it for tied heads. ``dtype``: number format to store; None: the current one.
    """
    checkpoint = load(source, vocab_size=output.shape[0])
    config, weights = checkpoint.config, checkpoint.weights
    if layout != "paceline":
        weights = untied(config, weights, output.to(next(iter(weights.values())).dtype))
        config = replace(config, tied=False)
    return save(
        out, config, {n: check_finite(n, x, dtype or x.dtype, where=source) for n, x in weights.items()}, layout=layout
    )


def _compare(folder: Path, claims: Claims, config: MedusaConfig) -> None:
    if claims.heads is not None and claims.heads > config.heads:
        raise MissingWeightsError(
            f"{folder}/{CONFIG}: medusa_num_heads: expected {config.heads}, the number of heads in the weights, got "
            f"{claims.heads}; download the checkpoint in full, or correct the file"
        )
    if claims.heads is not None and claims.heads < config.heads:
        # Published files say 2 and hold 5: Medusa's own loader overrides the number.
        log.info("%s: the configuration has %d heads, the weights %d; all are used", folder, claims.heads, config.heads)
    if claims.layers is not None and claims.layers != config.layers:
        raise MissingWeightsError(
            f"{folder}/{CONFIG}: medusa_num_layers: expected {config.layers}, the number of blocks in the weights, "
            f"got {claims.layers}; download the checkpoint in full, or correct the file"
        )
    if claims.tied is False and config.tied:
        raise MissingWeightsError(
            f"{folder}: expected the projections that its {CONFIG} declares, got none; download the checkpoint in full"
        )
