"""A checkpoint's weights, checked against the configuration and loaded in the dtype a decoder computes in.

Names, shapes and formats of all tensors are compared before any data are converted. A large tensor is read some rows at
a time, from the file opened anew for each of them, because what was read of a mapped file stays in memory until it is
closed. Memory: the result plus some rows of a tensor and of the files; a rank's columns are read at once, and a file in
the format of PyTorch before 1.6 is held whole while it is read.
"""

from __future__ import annotations

import os
import re
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
    UnknownArchitectureError,
    WeightShapeError,
    WeightValueError,
)
from paceline.decoder.gguf.checkpoint import GgufFile
from paceline.decoder.models import registry
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.family import Family
from paceline.decoder.parallel.sharding import Shard, Split, TensorSlice, TensorSpec
from paceline.decoder.weights.coded import READERS, CodedMatrix, Parts
from paceline.decoder.weights.files import check_stored, is_mapped
from paceline.decoder.weights.folder import check_kept, find_weight_files, is_gguf
from paceline.decoder.weights.formats import GROUP, WeightFormat
from paceline.decoder.weights.hub import checkpoint_path
from paceline.decoder.weights.layouts import EIGHT_BITS, STORED_FORMATS, StoredLayout, stored_layout
from paceline.decoder.weights.open import OpenFiles, Place, open_weight_file, unfused
from paceline.decoder.weights.quantize import (
    QuantizedTensor,
    Stored,
    joined_rows,
    quantize,
    quantize_pieces,
    return_free_memory,
    within_e4m3,
)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the checkpoint: its place and what it must be, open files, and the numbers of a piece.

    layout  of quantised matrices, and ``quantization_config``
    """

    place: Place
    spec: TensorSpec
    name: str
    files: OpenFiles
    layout: tuple[StoredLayout, Mapping[str, object]]
    portion: int = 0

    @property
    def file(self) -> Path:
        return self.place.file

    def coded(self) -> CodedMatrix | None:
        if not self.place.parts:
            return None
        (row, settings), (first, second) = self.layout, self.spec.shape
        if self.spec.transposed and row is not EIGHT_BITS:
            raise UnknownArchitectureError(
                f"{self.file}: {self.name}: expected floats, since the family stores its matrices as [in, out], got "
                f"{row.method}; use the checkpoint in float32, bfloat16 or float16"
            )
        parts = Parts(self.name, self.place.parts, self.files, (first, second), self.spec.transposed, settings)
        return READERS[row.name](parts)

    def range(self, span: tuple[int, int], *, dim: int) -> Tensor:
        """Rows (dim 0) or columns (dim 1); of a matrix [out, in] that is quantised, as floats."""
        coded = self.coded()
        if coded is None:
            return self.place.range(self.files, span, dim=dim)
        by_rows = dim == self.spec.transposed
        found = coded.floats(*span) if by_rows else coded.floats(0, coded.shape[0])[:, slice(*span)]
        return found.t() if self.spec.transposed else found

    def whole(self) -> Tensor:
        if self.place.parts:
            return self.range((0, self.spec.shape[0]), dim=0)
        return self.place.read(self.files)

    def pieces(self, *, dim: int = 0, span: tuple[int, int] | None = None) -> Iterator[Tensor]:
        """Rows (dim 0) or columns (dim 1) of a ``span`` one after another; a tensor with one dimension is one piece."""
        shape = self.spec.shape
        if len(shape) < 2:
            yield self.whole()
            return
        first, last = span or (0, shape[dim])
        step = max(1, self.portion * shape[dim] // max(1, prod(shape)))
        if step >= last - first:
            yield self.range((first, last), dim=dim)
            return
        for begin in range(first, last, step):
            some = (begin, min(begin + step, last))
            if not is_mapped(self.file):
                yield self.range(some, dim=dim)
                continue
            with OpenFiles() as anew:
                yield replace(self, files=anew).range(some, dim=dim)


def _kept(stored: _Stored, form: WeightFormat | None, *, blocks: bool) -> QuantizedTensor | None:
    """The matrix [out, in] with the numbers of the file, if a format has them, and ``form`` where one is wanted."""
    if coded := stored.coded():
        return coded.kept(form, blocks=blocks)
    source = stored.files(stored.file)
    return source.read_quantized(stored.place.stored, form) if isinstance(source, GgufFile) else None


def _as_stored(stored: _Stored, dtype: torch.dtype, part: TensorSlice | None, *, blocks: bool) -> Stored:
    """A tensor, or a rank's part, with the numbers of the file: quantised if it is and a format has them."""
    made = _kept(stored, None, blocks=blocks) if stored.place.parts and stored.spec.is_matrix else None
    if made is not None and part is not None and made.format.block_bytes:
        by_rows = (part.dim == 1) is stored.spec.transposed
        if not by_rows and any(at % GROUP for at in (*part.ranges[0], part.size)):
            made = None
    return _read_tensor(stored, dtype, part) if made is None else _read_matrix(stored, None, part, made=made)


def _read_matrix(
    stored: _Stored, form: WeightFormat | None, part: TensorSlice | None, *, made: QuantizedTensor | None
) -> QuantizedTensor:
    """A quantised matrix [out, in]; ``made``: the whole one as it is stored; ``form`` None: Q8_0 where there is none.

    One that is stored as the fp8_e4m3 that is asked for keeps to `E4M3_LARGEST`, as what is quantised here does.
    A rank's part has the numbers that one rank would have. Where they follow from its rows alone, no others are read;
    of its columns' rows, what is not its own is dropped as soon as they have their scales.
    """
    by_rows = part is not None and (part.dim == 1) is stored.spec.transposed
    if made is not None and made.beyond and form is WeightFormat.FP8_E4M3:
        made = within_e4m3(made)
    if part is None:
        return _quantised(stored, form, None) if made is None else made
    if made is None and not by_rows:
        return _quantised_columns(stored, form, part)
    if made is not None and not by_rows:
        (span,) = part.ranges  # of columns there is one
        return made.columns_of(*span, part.size)
    pieces = [_quantised(stored, form, span) if made is None else made.rows(*span) for span in part.ranges]
    filled = [
        piece if made is None and len(piece.data) == size else joined_rows([piece], size)  # a copy of what is a view
        for piece, size in zip(pieces, part.sizes, strict=True)
    ]
    return filled[0] if len(filled) == 1 else joined_rows(filled)


def _read_tensor(stored: _Stored, dtype: torch.dtype, part: TensorSlice | None) -> Tensor:
    """A contiguous copy in a dtype: the file may change or go afterwards, and take a window on it with it."""
    shape = stored.spec.shape
    if len(shape) < 2 or (part is not None and part.dim != 0):
        found = stored.whole() if part is None else _read_part(stored, part)
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


def _quantised(stored: _Stored, form: WeightFormat | None, span: tuple[int, int] | None) -> QuantizedTensor:
    rows, columns = _shape(stored)
    first, last = span or (0, rows)
    with _named(stored):
        pieces = _finite_rows(stored, (first, last))
        return quantize_pieces(pieces, (last - first, columns), form or WeightFormat.Q8_0)


def _quantised_columns(stored: _Stored, form: WeightFormat | None, part: TensorSlice) -> QuantizedTensor:
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


def _shape(stored: _Stored) -> tuple[int, int]:
    shape = stored.spec.shape
    return (shape[1], shape[0]) if stored.spec.transposed else (shape[0], shape[1])


@contextmanager
def _named(stored: _Stored) -> Iterator[None]:
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{stored.file}: {stored.name}: {error}") from error


def _finite_rows(stored: _Stored, span: tuple[int, int]) -> Iterator[Tensor]:
    """Rows of the matrix [out, in], in float32, in which every stored number is exact."""
    for piece in stored.pieces(dim=1 if stored.spec.transposed else 0, span=span):
        if piece.numel() and not _is_finite(piece):
            raise _damaged(stored)
        yield piece.t() if stored.spec.transposed else piece


def _converted(stored: _Stored, found: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = found.to(dtype, copy=True, memory_format=torch.contiguous_format)
    if tensor.numel() and not _is_finite(tensor):
        if _is_finite(found):
            raise WeightValueError(
                f"{stored.file}: {stored.name} contains values beyond the range of {dtype}; load it in "
                "torch.bfloat16 or torch.float32"
            )
        raise _damaged(stored)
    return tensor


def _damaged(stored: _Stored) -> WeightValueError:
    return WeightValueError(
        f"{stored.file}: {stored.name} contains NaN or infinity; download the file again, and if that does not help "
        "use another checkpoint"
    )


def _read_part(stored: _Stored, part: TensorSlice) -> Tensor:
    pieces: list[Tensor] = []
    for (first, last), size in zip(part.ranges, part.sizes, strict=True):
        piece = stored.range((first, last), dim=part.dim)
        pieces.append(piece)
        if missing := size - (last - first):
            shape = [missing if dim == part.dim else length for dim, length in enumerate(piece.shape)]
            pieces.append(piece.new_zeros(shape))
    return torch.cat(pieces, part.dim) if len(pieces) > 1 else pieces[0]


def _is_finite(tensor: Tensor) -> bool:
    # One pass without a temporary, where isfinite().all() makes several of the tensor's size; keeps NaN.
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))


_LAYER = re.compile(r"\.\d+\.")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PORTION, _PORTIONS = 1 << 17, 512  # numbers that are read before a file is opened anew: so many, or that share of all


def load_weights(
    path: str | os.PathLike[str],
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    progress: Callable[[int, int], None] | None = None,
    shard: Shard | None = None,
    quantization: str | None = None,
    modules_to_not_convert: Sequence[str] = (),
    blocks: bool = True,
) -> dict[str, Stored]:
    """All tensors that the model's family asks for, from the folder or GGUF file ``path``, contiguous, on the CPU.

    Of a ``shard``, its rank's parts alone are read; names and shapes of all tensors are checked nevertheless.

    The tensors are copies: the files may change or go afterwards. ``progress`` is called with (tensors done,
    tensors in all) after each one. With tied embeddings the result has no ``lm_head.weight``.

    ``quantization`` names the `WeightFormat` of all matrices (those of layers and of the vocabulary), or is "gguf":
    what a GGUF file has as Q8_0, Q4_0 or Q4_1 stays as it is, and its other matrices become Q8_0. Matrices that a
    checkpoint holds in 8 or 4 bits (`paceline.decoder.weights.layouts`) stay so where a format has the same numbers,
    one with blocks only if ``blocks``; those of fp8_e4m3 keep to `E4M3_LARGEST` if ``quantization`` names it.
    ``modules_to_not_convert`` names tables of the vocabulary ("lm_head", "embed_tokens") that are loaded as they are
    stored nevertheless.
    """
    if dtype not in _DTYPES:
        raise ConfigurationError(f"dtype: expected one of {', '.join(map(str, _DTYPES))}, got {dtype}; use one of them")
    family = registry.family(config.model_type)
    expected = family.tensors(config)
    place = checkpoint_path(path)
    layout = stored_layout(place)
    places = _prefixed(_with_parts(unfused(_survey(place), family, config), layout[0]), family, config)
    originals = {copy: name for name, spec in expected.items() for copy in spec.copies if copy in places}
    relevant = [one for one in places if one in expected or not (family.ignores(one, config) or _idle(one, places))]
    _check_names(place, relevant, expected, copies=set(originals))
    # Copies, which some checkpoints keep of tied tensors, are read, compared and dropped.
    specs = expected | {copy: expected[name] for copy, name in originals.items()}
    _check_infos(places, specs, layout)
    left = _left_alone(specs, modules_to_not_convert, quantization)
    formats = _formats(place, places, specs, quantization=quantization)
    formats = {name: form for name, form in formats.items() if name not in left}
    loaded, copies = dict[str, Stored](), dict[str, Stored]()
    for stored in _opened(places, specs, layout):
        cut = None if shard is None else shard.slice_of(stored.spec)
        tensor = _read(stored, formats, cut, dtype=dtype, blocks=blocks)
        if stored.name not in expected:
            copies[stored.name] = tensor
            continue
        loaded[stored.name] = tensor
        if progress is not None:
            progress(len(loaded), len(expected))
    for name, tensor in copies.items():
        if not _equal(tensor, loaded[originals[name]]):
            raise CheckpointError(
                f"{places[name].file}: {name} differs from {originals[name]}, although config.json sets "
                "tie_word_embeddings; set it to false to use both, or download the checkpoint again"
            )
    if quantization is None:
        _widen_where_mixed(loaded, specs, dtype)
    return {name: loaded[name] for name in expected}


def _read(
    stored: _Stored,
    formats: Mapping[str, WeightFormat | None],
    part: TensorSlice | None,
    *,
    dtype: torch.dtype,
    blocks: bool,
) -> Stored:
    if stored.name in formats:
        form = formats[stored.name]
        return _read_matrix(stored, form, part, made=_kept(stored, form, blocks=True))
    return _as_stored(stored, torch.float32 if stored.spec.exact else dtype, part, blocks=blocks)


def load_floats(
    path: Path, specs: Mapping[str, TensorSpec], dtype: torch.dtype, *, prefix: str, unused: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Read what a folder has next to the network, as floats: the tensors whose names begin with ``prefix``, by the rest
    of their names, without the ``unused`` ones; with the checks of `load_weights`.
    """
    layout = stored_layout(path)
    found = _with_parts(_survey(path), layout[0])
    places = {name.removeprefix(prefix): place for name, place in found.items() if name.startswith(prefix)}
    expected = dict(specs)
    _check_names(path, [name for name in places if name not in unused], expected, copies=set())
    _check_infos(places, expected, layout)
    return {
        stored.name: _read_tensor(stored, torch.float32 if stored.spec.exact else dtype, None)
        for stored in _opened(places, expected, layout)
    }


def _widen_where_mixed(loaded: dict[str, Stored], specs: Mapping[str, TensorSpec], dtype: torch.dtype) -> None:
    """Turn matrices into floats that a layer joins with floats, or with matrices of another format."""
    together: dict[tuple[str, Split], list[str]] = {}
    for name, spec in specs.items():
        if name in loaded and spec.is_product and spec.is_matrix:
            number = _LAYER.search(name)
            split = Split.QUERY_ROWS if spec.split is Split.KEY_ROWS else spec.split
            together.setdefault((number[0] if number else "", split), []).append(name)
    for names in together.values():
        if len({one.format if isinstance(one := loaded[name], QuantizedTensor) else None for name in names}) == 1:
            continue
        for name in names:
            if isinstance(one := loaded[name], QuantizedTensor):
                wide = one.dequantize().to(dtype)
                loaded[name] = wide.t().contiguous() if specs[name].transposed else wide


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


def _formats(
    path: Path, places: Mapping[str, Place], specs: Mapping[str, TensorSpec], *, quantization: str | None
) -> dict[str, WeightFormat | None]:
    """The format of every matrix that is to be quantised: its own, if it is int8 or an 8-bit float in the checkpoint,
    else the one that is asked for; None: as it is stored, or Q8_0.
    """
    if quantization is None:
        return {}
    check_kept(path, quantization)
    asked = None if quantization == "gguf" else WeightFormat.of(quantization)
    formats = {name: asked for name, spec in specs.items() if spec.is_matrix}
    for name in formats:
        form = STORED_FORMATS.get(places[name].info.dtype) if places[name].parts else None
        if form is not None and (asked is None or asked.dtype != form.dtype):
            raise ConfigurationError(
                f"quantization: expected none, since the checkpoint is already {form.value}, got {quantization!r}; "
                "omit it"
            )
        formats[name] = form or asked
    return formats


def _equal(one: Stored, other: Stored) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8))


def _survey(path: Path) -> dict[str, Place]:
    """Every tensor in the folder's files. The files are believed, not their index, which only names them."""
    if not path.is_dir() and not is_gguf(path):
        raise CheckpointError(f"{path}: expected a folder; give the local folder of a Hugging Face checkpoint")
    places: dict[str, Place] = {}
    for file in [path] if is_gguf(path) else find_weight_files(path):
        with open_weight_file(file) as source:
            for name, info in source.infos().items():
                if name in places:
                    raise CheckpointError(
                        f"{name}: expected the tensor in one file, got both {places[name].file} and {file}; "
                        "download the checkpoint again, since the shards come from different downloads"
                    )
                places[name] = Place(file, name, info)
    return places


def _with_parts(places: dict[str, Place], layout: StoredLayout) -> dict[str, Place]:
    made = dict(places)
    for name, place in places.items():
        module = name.removesuffix(layout.parts[0])
        if name != module + layout.parts[0] or not module.endswith("."):
            continue
        parts = {part: places[module + part] for part in layout.parts if module + part in places}
        if layout.scales and not (place.info.dtype in STORED_FORMATS and any(one in parts for one in layout.scales)):
            continue
        for part in (*parts, *layout.unused):
            made.pop(module + part, None)
        made[f"{module}weight"] = replace(place, parts=parts)
    return made


def _idle(name: str, places: Mapping[str, Place]) -> bool:
    """Whether a tensor is a bias of zeros, which some programs write for every matrix that they quantise."""
    matrix = places.get(f"{name.removesuffix('bias')}weight")
    if matrix is None or not matrix.parts or not name.endswith(".bias"):
        return False
    with OpenFiles() as files:
        return not bool(places[name].read(files).any())


def _opened(
    places: Mapping[str, Place], specs: Mapping[str, TensorSpec], layout: tuple[StoredLayout, Mapping[str, object]]
) -> Iterator[_Stored]:
    """The tensors, file by file, in open files.

    A file is mapped, and what was read of it stays in memory until it is closed: so it is opened once for each portion.
    """
    portion = max(_PORTION, sum(prod(spec.shape) for spec in specs.values()) // _PORTIONS)
    for file in dict.fromkeys(places[name].file for name in specs):
        mapped, left = is_mapped(file), [name for name in specs if places[name].file == file]
        while left:
            return_free_memory()  # of the pieces that were read before
            size = 0
            with OpenFiles() as files:
                while left and not (mapped and size >= portion):
                    name = left.pop(0)
                    size += prod(specs[name].shape)
                    yield _Stored(places[name], specs[name], name, files, layout, portion)


def _prefixed(places: dict[str, Place], family: Family, config: ModelConfig) -> dict[str, Place]:
    """The names of a whole model, where the checkpoint is of the network without its head."""
    prefix = family.bare_prefix
    if not prefix or any(name.startswith(prefix) for name in places):
        return places
    whole = {name for name in places if name.startswith("lm_head.") or family.ignores(name, config)}
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


def _check_infos(
    places: dict[str, Place], specs: dict[str, TensorSpec], layout: tuple[StoredLayout, Mapping[str, object]]
) -> None:
    with OpenFiles() as files:
        for name, spec in specs.items():
            place = places[name]
            if place.parts and len(spec.shape) == 2:
                _Stored(place, spec, name, files, layout).coded()
                continue
            if place.info.shape != spec.shape:
                raise WeightShapeError(
                    f"{place.file}: {name}: expected shape {list(spec.shape)} from {_configuration(place.file)}, got "
                    f"{list(place.info.shape)}; use the configuration that belongs to these weights"
                )
            check_stored(name, place.info.dtype, where=place.file)


def _configuration(path: Path) -> str:
    return "the file's metadata" if is_gguf(path) else "config.json"


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
