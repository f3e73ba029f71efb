"""A checkpoint's weights, checked against the configuration and loaded in the dtype a decoder computes in.

Names, shapes and formats of all tensors are compared before any data are converted, so that a wrong folder fails at
once. A large tensor is read some rows at a time, from the file opened anew for each of them, because what was read of a
mapped file stays in memory until it is closed. It neither builds a model nor lays weights out for a kernel. Memory: the
result plus some rows of a tensor and of the files; a rank's columns are read at once, and a file in the format of
PyTorch before 1.6 is held whole while it is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import (
    CheckpointError,
    ConfigurationError,
    MissingWeightsError,
    WeightShapeError,
    WeightValueError,
)
from paceline.decoder.models import registry
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.family import Family
from paceline.decoder.parallel.sharding import Shard, TensorSlice, TensorSpec
from paceline.decoder.weights.compressed import STORED_FORMATS
from paceline.decoder.weights.files import TensorInfo, WeightFile, check_stored, is_mapped
from paceline.decoder.weights.folder import check_kept, find_weight_files, is_gguf
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.hub import checkpoint_path
from paceline.decoder.weights.open import open_weight_file
from paceline.decoder.weights.quantize import (
    QuantizedTensor,
    Stored,
    joined_rows,
    quantize,
    quantize_pieces,
    return_free_memory,
    scale_name,
    scaled_matrix,
    within_e4m3,
)


@dataclass(frozen=True, slots=True)
class _TensorInFile:
    """A tensor in a file: an open one, its path, the name there, what it must be, and the numbers of a piece."""

    source: WeightFile
    file: Path
    name: str
    spec: TensorSpec
    portion: int

    def pieces(self, *, dim: int = 0, span: tuple[int, int] | None = None) -> Iterator[Tensor]:
        """Rows (dim 0) or columns (dim 1) of a ``span`` one after another; a tensor with one dimension is one piece."""
        shape = self.spec.shape
        if len(shape) < 2:
            yield self.source.read(self.name)
            return
        first, last = span or (0, shape[dim])
        step = max(1, self.portion * shape[dim] // max(1, prod(shape)))
        if step >= last - first:
            yield self.source.read_range(self.name, (first, last), dim=dim)
            return
        for begin in range(first, last, step):
            some = (begin, min(begin + step, last))
            if not is_mapped(self.file):
                yield self.source.read_range(self.name, some, dim=dim)
                continue
            with open_weight_file(self.file) as anew:
                yield anew.read_range(self.name, some, dim=dim)


def _read_matrix(stored: _TensorInFile, form: WeightFormat | None, part: TensorSlice | None) -> QuantizedTensor:
    """A quantised matrix [out, in]; ``form`` None: as it is stored, or Q8_0.

    One that is stored as the fp8_e4m3 that is asked for keeps to `E4M3_LARGEST`, as what is quantised here does.
    A rank's part has the numbers that one rank would have. Where they follow from its rows alone, no others are read;
    of its columns' rows, what is not its own is dropped as soon as they have their scales.

    Raises:
        ConfigurationError: the format does not go with its width, or with the ranks.
        WeightValueError: it holds NaN or infinity.
    """
    by_rows = part is not None and (part.dim == 1) is stored.spec.transposed
    made = _turned(stored, form) if stored.spec.transposed else stored.source.read_quantized(stored.name, form)
    if made is not None and made.beyond and form is WeightFormat.FP8_E4M3:
        made = within_e4m3(made)
    if made is None and part is not None and form is not WeightFormat.INT8_PER_TENSOR:
        return _quantised_rows(stored, form, part) if by_rows else _quantised_columns(stored, form, part)
    if made is None:
        made = _quantised(stored, form, None)
    if part is None:
        return made
    if not by_rows:
        (span,) = part.ranges  # of columns there is one
        return made.columns_of(*span, part.size)
    pieces = [made.rows(*span) for span in part.ranges]
    return joined_rows([joined_rows([piece], size) for piece, size in zip(pieces, part.sizes, strict=True)])


def _turned(stored: _TensorInFile, form: WeightFormat | None) -> QuantizedTensor | None:
    """Transpose an 8-bit matrix with scales that is stored as [in, out], as GGUF files store some."""
    if is_gguf(stored.file):
        return stored.source.read_quantized(stored.name, form)
    infos = stored.source.infos()
    scale = scale_name(stored.name, infos)
    if scale is None:
        return None
    found = STORED_FORMATS[infos[stored.name].dtype]
    if form not in (None, found):
        return None
    return scaled_matrix(
        stored.name,
        found,
        _shape(stored),
        read=lambda begin, end: stored.source.read_range(stored.name, (begin, end), dim=1).t(),
        scales=stored.source.read(scale),
    )


def _read_tensor(stored: _TensorInFile, dtype: torch.dtype, part: TensorSlice | None) -> Tensor:
    """A contiguous copy in a dtype: the file may change or go afterwards, and take a window on it with it.

    Raises:
        WeightValueError: it holds NaN or infinity, or numbers beyond the dtype.
    """
    shape = stored.spec.shape
    if len(shape) < 2 or (part is not None and part.dim != 0):
        found = stored.source.read(stored.name) if part is None else _read_part(stored.source, stored.name, part)
        return _converted(stored, found, dtype)
    cut = part or TensorSlice(0, ((0, shape[0]),), (shape[0],))
    made = torch.empty(cut.size, *shape[1:], dtype=dtype)
    begin = 0
    for span, size in zip(cut.ranges, cut.sizes, strict=True):
        end = begin
        for piece in stored.pieces(span=span):
            made[end : end + len(piece)] = _converted(stored, piece, dtype)
            end += len(piece)
        begin += size
        made[end:begin] = 0  # a rank of zeros
    return made


def _quantised(stored: _TensorInFile, form: WeightFormat | None, span: tuple[int, int] | None) -> QuantizedTensor:
    """Rows of the matrix [out, in] in a format; None: all of them."""
    rows, columns = _shape(stored)
    first, last = span or (0, rows)
    with _named(stored):
        return quantize_pieces(
            lambda: _finite_rows(stored, (first, last)), (last - first, columns), form or WeightFormat.Q8_0
        )


def _quantised_rows(stored: _TensorInFile, form: WeightFormat | None, part: TensorSlice) -> QuantizedTensor:
    """A rank's rows of the matrix [out, in] in a format."""
    made = [_quantised(stored, form, span) for span in part.ranges]
    filled = [
        one if len(one.data) == size else joined_rows([one], size) for one, size in zip(made, part.sizes, strict=True)
    ]
    return filled[0] if len(filled) == 1 else joined_rows(filled)


def _quantised_columns(stored: _TensorInFile, form: WeightFormat | None, part: TensorSlice) -> QuantizedTensor:
    """A rank's columns of the matrix [out, in] in a format, whose scales are those of the whole rows."""
    form = form or WeightFormat.Q8_0
    (span,) = part.ranges  # of columns there is one
    rows = _shape(stored)[0]
    data = torch.empty(rows, form.row_bytes(part.size), dtype=form.dtype)
    scales = None if form.block_bytes else torch.empty(rows)
    begin = 0
    with _named(stored):
        for whole in _finite_rows(stored, (0, rows)):
            piece = quantize(whole, form).columns_of(*span, part.size)
            end = begin + len(piece.data)
            data[begin:end] = piece.data
            if scales is not None and piece.scales is not None:
                scales[begin:end] = piece.scales
            begin = end
    assert begin == rows, "the pieces are the matrix"
    return QuantizedTensor(data, scales, form, part.size)


def _shape(stored: _TensorInFile) -> tuple[int, int]:
    """Rows and columns of the matrix [out, in]."""
    shape = stored.spec.shape
    return (shape[1], shape[0]) if stored.spec.transposed else (shape[0], shape[1])


@contextmanager
def _named(stored: _TensorInFile) -> Iterator[None]:
    """Errors of a format, with the matrix's name."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{stored.file}: {stored.name}: {error}") from error


def _finite_rows(stored: _TensorInFile, span: tuple[int, int]) -> Iterator[Tensor]:
    """Rows of the matrix [out, in], in float32, in which every stored number is exact."""
    for piece in stored.pieces(dim=1 if stored.spec.transposed else 0, span=span):
        if piece.numel() and not _is_finite(piece):
            raise _damaged(stored)
        yield piece.t() if stored.spec.transposed else piece


def _converted(stored: _TensorInFile, found: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = found.to(dtype, copy=True, memory_format=torch.contiguous_format)
    if tensor.numel() and not _is_finite(tensor):
        if _is_finite(found):
            raise WeightValueError(
                f"{stored.file}: {stored.name} contains values beyond the range of {dtype}; load it in "
                "torch.bfloat16 or torch.float32"
            )
        raise _damaged(stored)
    return tensor


def _damaged(stored: _TensorInFile) -> WeightValueError:
    return WeightValueError(
        f"{stored.file}: {stored.name} contains NaN or infinity; download the file again, and if that does not help "
        "use another checkpoint"
    )


def _read_part(source: WeightFile, name: str, part: TensorSlice) -> Tensor:
    pieces: list[Tensor] = []
    for (first, last), size in zip(part.ranges, part.sizes, strict=True):
        piece = source.read_range(name, (first, last), dim=part.dim)
        pieces.append(piece)
        if missing := size - (last - first):
            shape = [missing if dim == part.dim else length for dim, length in enumerate(piece.shape)]
            pieces.append(piece.new_zeros(shape))
    return torch.cat(pieces, part.dim) if len(pieces) > 1 else pieces[0]


def _is_finite(tensor: Tensor) -> bool:
    # One pass without a temporary, where isfinite().all() makes several of the tensor's size; keeps NaN.
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PORTION, _PORTIONS = 1 << 17, 512  # numbers that are read before a file is opened anew: so many, or that share of all


@dataclass(frozen=True, slots=True)
class _Place:
    """Location of a tensor in the checkpoint: its file, its name there, its entry in that file, and whether it has
    8-bit numbers with separate scales.
    """

    file: Path
    stored: str
    info: TensorInfo
    scaled: bool = False


def load_weights(
    path: str | os.PathLike[str],
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    progress: Callable[[int, int], None] | None = None,
    shard: Shard | None = None,
    quantization: str | None = None,
    modules_to_not_convert: Sequence[str] = (),
) -> dict[str, Stored]:
    """All tensors that the model's family asks for, from the folder or GGUF file ``path``, contiguous, on the CPU.

    Of a ``shard``, its rank's parts alone are read; names and shapes of all tensors are checked nevertheless.

    The tensors are copies: the files may change or go afterwards. ``progress`` is called with (tensors done,
    tensors in all) after each one. With tied embeddings the result has no ``lm_head.weight``.

    ``quantization`` names the `WeightFormat` of all matrices (those of layers and of the vocabulary), or is "gguf":
    what a GGUF file has as Q8_0, Q4_0 or Q4_1 stays as it is, and its other matrices become Q8_0. Matrices that a
    checkpoint holds in 8 bits (`paceline.decoder.weights.compressed`) stay so without it; with it, those of fp8_e4m3
    keep to `E4M3_LARGEST`. ``modules_to_not_convert`` names tables of the vocabulary ("lm_head", "embed_tokens") that
    are loaded as ``dtype`` nevertheless.
    """
    if dtype not in _DTYPES:
        raise ConfigurationError(f"dtype: expected one of {', '.join(map(str, _DTYPES))}, got {dtype}; use one of them")
    family = registry.family(config.model_type)
    expected = family.tensors(config)
    place = checkpoint_path(path)
    places = _prefixed(_survey(place), family)
    originals = {copy: name for name, spec in expected.items() for copy in spec.copies if copy in places}
    relevant = [name for name in places if name in expected or not family.ignores(name)]
    _check_names(place, relevant, expected, copies=set(originals))
    # Copies, which some checkpoints keep of tied tensors, are read, compared and dropped.
    specs = expected | {copy: expected[name] for copy, name in originals.items()}
    _check_infos(places, specs)
    left = _left_alone(specs, modules_to_not_convert, quantization)
    matrices = _formats(place, specs, quantization) | _stored_formats(places, specs, quantization)
    matrices = {name: form for name, form in matrices.items() if name not in left or places[name].scaled}
    loaded: dict[str, Stored] = {}
    copies: dict[str, Stored] = {}
    portion = max(_PORTION, sum(prod(spec.shape) for spec in specs.values()) // _PORTIONS)
    for file, names in _portions(places, specs, portion):
        return_free_memory()  # of the pieces that were read before
        with open_weight_file(file) as source:
            for name in names:
                cut = None if shard is None else shard.slice_of(specs[name])
                kept = torch.float32 if specs[name].exact else dtype
                stored = _TensorInFile(source, file, places[name].stored, specs[name], portion)
                tensor: Stored = (
                    _read_matrix(stored, matrices[name], cut) if name in matrices else _read_tensor(stored, kept, cut)
                )
                if name not in expected:
                    copies[name] = tensor
                    continue
                loaded[name] = tensor
                if progress is not None:
                    progress(len(loaded), len(expected))
    for name, tensor in copies.items():
        _check_tied(places[name].file, name, originals[name], equal=_equal(tensor, loaded[originals[name]]))
    return {name: loaded[name] for name in expected}


def _formats(path: Path, specs: Mapping[str, TensorSpec], quantization: str | None) -> dict[str, WeightFormat | None]:
    """The format of every matrix that is to be quantised; None: as it is stored, or Q8_0."""
    if quantization is None:
        return {}
    check_kept(path, quantization)
    form = None if quantization == "gguf" else WeightFormat.of(quantization)
    return {name: form for name, spec in specs.items() if spec.is_matrix}


def _left_alone(specs: Mapping[str, TensorSpec], modules: Sequence[str], quantization: str | None) -> set[str]:
    """The tables of the vocabulary that are not to be quantised, by the names of their modules or the ends of those."""
    if modules and quantization is None:
        raise ConfigurationError(
            f"modules_to_not_convert: expected quantization to be set too, got only {list(modules)}; set "
            "quantization, or omit modules_to_not_convert"
        )
    tables: dict[str, set[str]] = {}
    for name, spec in specs.items():
        if spec.is_matrix and not spec.is_product:
            for module in (tensor.removesuffix(".weight") for tensor in (name, *spec.copies)):
                tables.setdefault(module, set()).update((name, *(copy for copy in spec.copies if copy in specs)))
    left: set[str] = set()
    for asked in modules:
        found = [names for module, names in tables.items() if f".{module}".endswith(f".{asked}")]
        if not found:
            raise ConfigurationError(
                f"modules_to_not_convert: expected {' or '.join(tables)}, got {asked!r}; list only these, since the "
                "layers' matrices are quantised all or none"
            )
        left.update(*found)
    return left


def _stored_formats(
    places: Mapping[str, _Place], specs: Mapping[str, TensorSpec], quantization: str | None
) -> dict[str, WeightFormat | None]:
    """The matrices that are int8 or 8-bit floats in the checkpoint and stay so."""
    asked = WeightFormat.FP8_E4M3 if quantization == WeightFormat.FP8_E4M3.value else None
    stored: dict[str, WeightFormat | None] = {name: asked for name in specs if places[name].scaled}
    for form in {STORED_FORMATS[places[name].info.dtype] for name in stored}:
        if quantization is not None and (quantization == "gguf" or WeightFormat.of(quantization).dtype != form.dtype):
            raise ConfigurationError(
                f"quantization: expected none, since the checkpoint is already {form.value}, got {quantization!r}; "
                "omit it"
            )
    return stored


def _equal(one: Stored, other: Stored) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8))


def _survey(path: Path) -> dict[str, _Place]:
    """Every tensor in the folder's files. The files are believed, not their index, which only names them."""
    if not path.is_dir() and not is_gguf(path):
        raise CheckpointError(f"{path}: expected a folder; give the local folder of a Hugging Face checkpoint")
    places: dict[str, _Place] = {}
    for file in [path] if is_gguf(path) else find_weight_files(path):
        with open_weight_file(file) as source:
            for name, info in source.infos().items():
                if name in places:
                    raise CheckpointError(
                        f"{name}: expected the tensor in one file, got both {places[name].file} and {file}; "
                        "download the checkpoint again, since the shards come from different downloads"
                    )
                places[name] = _Place(file, name, info)
    return _with_scales(places)


def _with_scales(places: dict[str, _Place]) -> dict[str, _Place]:
    """The same without the scales of matrices of 8 bits, which are read together with them."""
    made = dict(places)
    for name, place in places.items():
        if place.info.dtype in STORED_FORMATS and (beside := scale_name(name, places)) is not None:
            scale = made.pop(beside)
            if scale.file != place.file:
                raise MissingWeightsError(
                    f"{name}: expected a matrix and its scales in one file, got {place.file} and {scale.file}; save "
                    "the checkpoint again"
                )
            made[name] = replace(place, scaled=True)
    return made


def _portions(
    places: dict[str, _Place], specs: dict[str, TensorSpec], numbers: int
) -> Iterator[tuple[Path, list[str]]]:
    """The tensors of each file, some at a time.

    A file is mapped, and what was read of it stays in memory until it is closed: so it is opened once for each portion.
    """
    for file in dict.fromkeys(places[name].file for name in specs):
        portion: list[str] = []
        size = 0
        for name in (name for name in specs if places[name].file == file):
            portion.append(name)
            size += prod(places[name].info.shape)
            if size >= numbers and is_mapped(file):
                yield file, portion
                portion, size = [], 0
        if portion:
            yield file, portion


def _prefixed(places: dict[str, _Place], family: Family) -> dict[str, _Place]:
    """The names of a whole model, where the checkpoint is of the network without its head."""
    prefix = family.bare_prefix
    if not prefix or any(name.startswith(prefix) for name in places):
        return places
    whole = {name for name in places if name.startswith("lm_head.") or family.ignores(name)}
    return {name if name in whole else prefix + name: place for name, place in places.items()}


def _check_names(folder: Path, found: list[str], expected: dict[str, TensorSpec], *, copies: set[str]) -> None:
    missing = [name for name in expected if name not in found]
    if missing:
        raise MissingWeightsError(
            f"{folder}: expected the tensors {_some(missing)}, got none; download the checkpoint in full, and check "
            f"that {_configuration(folder)} belongs to these weights (num_hidden_layers, tie_word_embeddings and "
            "the *_bias options decide what is needed)"
        )
    surplus = [name for name in found if name not in expected and name not in copies]
    if surplus:
        raise CheckpointError(
            f"{folder}: expected only tensors that this configuration uses, got also {_some(surplus)}; check that "
            f"{_configuration(folder)} belongs to these weights and that they are of a causal language model"
        )


def _check_infos(places: dict[str, _Place], specs: dict[str, TensorSpec]) -> None:
    for name, spec in specs.items():
        place = places[name]
        if place.info.shape != spec.shape:
            raise WeightShapeError(
                f"{place.file}: {name}: expected shape {list(spec.shape)} from {_configuration(place.file)}, got "
                f"{list(place.info.shape)}; use the configuration that belongs to these weights"
            )
        if not (place.scaled and spec.is_matrix):
            check_stored(name, place.info.dtype, where=place.file)


def _check_tied(file: Path, copy: str, original: str, *, equal: bool) -> None:
    if not equal:
        raise CheckpointError(
            f"{file}: {copy} differs from {original}, although config.json sets tie_word_embeddings; set it to "
            "false to use both, or download the checkpoint again"
        )


def _configuration(path: Path) -> str:
    """Return the path of the configuration."""
    return "the file's metadata" if is_gguf(path) else "config.json"


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
