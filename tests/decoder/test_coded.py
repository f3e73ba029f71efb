"""Checkpoints with matrices of few bits, as other programs write them: the numbers, the tokens, and what is rejected.

Writers follow the published layouts. `recorded_matrices.json` has one matrix of each library, written by it and turned
back by its own code; ours must be the same numbers once they are rounded to the library's type.
"""

from __future__ import annotations

import base64
import copy
import json
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import CheckpointError, MissingWeightsError, UnknownArchitectureError, WeightValueError
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.parallel.sharding import GQA, Layout, Shard
from paceline.decoder.weights.checkpoint import load_weights
from paceline.decoder.weights.coded import READERS, Parts
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.layouts import LAYOUTS, layout_of
from paceline.decoder.weights.open import OpenFiles, Place
from paceline.decoder.weights.quantize import QuantizedTensor, Stored
from paceline.decoder.weights.save_quantized import QUANTIZATION_CONFIG
from tests.decoder import families, tiny

PROMPTS = [[5, 9, 13, 5], [40, 2]]
UP = "model.layers.0.mlp.up_proj."
Written = tuple[dict[str, Tensor], Tensor]
"""Tensors of a module by the part of their names after it, and the matrix that they mean."""


def packed(values: Tensor, bits: int) -> Tensor:
    """Rows of numbers in int32 words, bit by bit: number i of a row begins at bit i * bits."""
    unsigned = values.to(torch.int64) + (1 << (bits - 1))
    words = torch.zeros(len(values), -(-values.shape[1] * bits // 32), dtype=torch.int64)
    for column in range(values.shape[1]):
        word, bit = divmod(column * bits, 32)
        words[:, word] |= unsigned[:, column] << bit
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def coded(
    weight: Tensor,
    *,
    bits: int = 4,
    group: int,
    symmetric: bool = True,
    dtype: torch.dtype = torch.float16,
    order: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Integers [N, K], scales and zeros [N, groups] and what they mean; ``order``: the group of each column."""
    columns = weight.shape[1]
    order = torch.arange(columns) // (group or columns) if order is None else order
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    scales, zeros = [], []
    for number in range(int(order.max()) + 1):
        some = weight[:, order == number]
        scales.append(
            ((some.abs().amax(1) / high) if symmetric else (some.amax(1) - some.amin(1)) / (high - low)).to(dtype)
        )
        zero = (
            torch.zeros(len(weight))
            if symmetric
            else (low - some.amin(1) / scales[-1].float()).round().clamp(low, high)
        )
        zeros.append(zero)
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    wide, shift = scale.float()[:, order], zero[:, order]
    numbers = (weight / wide + shift).round().clamp(low, high)
    return numbers, scale, zero, (numbers - shift) * wide


def pack_quantized(weight: Tensor, *, acts: bool = False, **how: Any) -> Written:
    columns, bits = weight.shape[1], how.get("bits", 4)
    order = (torch.arange(columns) // how["group"])[torch.randperm(columns)] if acts else None
    numbers, scales, zeros, meant = coded(weight, order=order, **how)
    found = {"weight_packed": packed(numbers, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not how.get("symmetric", True):
        found["weight_zero_point"] = packed(zeros.t(), bits).t().contiguous()
    if order is not None:
        found["weight_g_idx"] = order.int()
    return found, meant


def gptq(weight: Tensor, *, acts: bool = False, second: bool = False, bare: bool = False, **how: Any) -> Written:
    """``second``: gptq_v2; ``bare``: without g_idx."""
    bits, columns = how.get("bits", 4), weight.shape[1]
    order = torch.arange(columns) // (how["group"] or columns)
    order = order[torch.randperm(columns)] if acts else order
    numbers, scales, zeros, meant = coded(weight, order=order, **how)
    ones = 0 if second else sum(1 << at for at in range(0, 32, bits))
    found = {
        "qweight": packed(numbers, bits).t().contiguous(),
        "qzeros": packed(zeros.t(), bits) - ones,
        "scales": scales.t().contiguous(),
    }
    return found if bare else found | {"g_idx": order.int()}, meant


def awq(weight: Tensor, *, group: int, symmetric: bool = False) -> Written:
    numbers, scales, zeros, meant = coded(weight, group=group, symmetric=symmetric)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # which column is in which place of a word

    def words(values: Tensor) -> Tensor:
        return packed(values.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4)

    return {"qweight": words(numbers.t()), "qzeros": words(zeros.t()), "scales": scales.t().contiguous()}, meant


def eight_bits(
    weight: Tensor,
    block: tuple[int, int] | None,
    *,
    name: str = "weight_scale_inv",
    rows: bool = False,
    two: bool = False,
) -> Written:
    """``block`` None: one scale, or one for each of the ``rows``; the last blocks may be smaller. ``two``: powers of
    two, as bytes.
    """
    high, wide = block or (1 if rows else len(weight), weight.shape[1])
    cells = [[part.abs().amax() / 448 for part in line.split(wide, 1)] for line in weight.split(high)]
    scales = torch.tensor(cells)
    scales = scales.log2().ceil().exp2() if two else scales
    spread = scales.repeat_interleave(high, 0)[: len(weight)].repeat_interleave(wide, 1)[:, : weight.shape[1]]
    data = (weight / spread).to(torch.float8_e4m3fn)
    found = {"weight": data, name: scales.to(torch.float8_e8m0fnu) if two else scales}
    one = {} if block or rows else {name: scales.view(()), "activation_scale": torch.ones(())}
    return found | one, data.float() * spread


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(weight: Tensor) -> Written:
    blocks = weight.unflatten(1, (-1, 32))
    exponents = blocks.abs().amax(2).log2().floor() - 2
    numbers = ((blocks / exponents.exp2().unsqueeze(2)).unsqueeze(3) - E2M1).abs().argmin(3)
    pairs = numbers.flatten(1).to(torch.uint8)
    found = {"weight_packed": pairs[:, 0::2] | pairs[:, 1::2] << 4, "weight_scale": (exponents + 127).to(torch.uint8)}
    return found, (E2M1[numbers] * exponents.exp2().unsqueeze(2)).flatten(1)


def four_bits(weight: Tensor, *, block: int, double: bool) -> Written:
    """bitsandbytes: blocks of the matrix as one row of numbers."""
    code = torch.linspace(-1, 1, 16) ** 3
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % block)).view(-1, block)
    absmax = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    found = {"weight.absmax": absmax, "weight.quant_map": code}
    if double:
        offset, outer = (
            float(absmax.mean()),
            torch.stack([part.abs().amax() for part in (absmax - absmax.mean()).split(4)]),
        )
        table = torch.linspace(-1, 1, 256)
        spread = outer.repeat_interleave(4)[: len(absmax)]
        places = (((absmax - offset) / spread).unsqueeze(1) - table).abs().argmin(1)
        absmax = table[places] * spread + offset
        state |= {"nested_blocksize": 4, "nested_offset": offset, "nested_dtype": "float32"}
        found |= {
            "weight.absmax": places.to(torch.uint8),
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": table,
        }
    places = ((blocks / absmax.unsqueeze(1)).unsqueeze(2) - code).abs().argmin(2)
    pairs = places.flatten()[: weight.numel()].to(torch.uint8)
    found["weight"] = (pairs[0::2] << 4 | pairs[1::2]).unsqueeze(1)
    found["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return found, (code[places] * absmax.unsqueeze(1)).flatten()[: weight.numel()].view(weight.shape)


def torchao(weight: Tensor, **how: Any) -> Written:
    numbers, scales, zeros, meant = coded(weight, **how)
    parts = {"_weight_qdata": numbers, "_weight_scale": scales, "_weight_zero_point": zeros}
    return {name: one if name.endswith("scale") else one.to(torch.int8) for name, one in parts.items()}, meant


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    made = copy.deepcopy(QUANTIZATION_CONFIG)
    made["ignore"], made["config_groups"]["group_0"]["targets"], made["format"] = ["lm_head"], ["Linear"], form
    made["config_groups"]["group_0"]["weights"] |= weights
    return made


def groups(bits: int, size: int | None, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    made = {"num_bits": bits, "symmetric": symmetric, "group_size": size, "strategy": "group" if size else "channel"}
    return compressed("pack-quantized", **made | more)


GPTQ, AWQ = {"quant_method": "gptq", "bits": 4, "sym": True}, {"quant_method": "awq", "bits": 4, "version": "gemm"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
DYNAMIC = compressed("float-quantized", type="float")
DYNAMIC["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True}
Q4, Q8, INT8, E4M3 = WeightFormat.Q4_0, WeightFormat.Q8_0, WeightFormat.INT8, WeightFormat.FP8_E4M3
Kind = tuple[dict[str, Any], WeightFormat | None, Callable[[Tensor], Written]]
KINDS: dict[str, Kind] = {
    "packed": (groups(4, 16), None, lambda w: pack_quantized(w, group=16, dtype=torch.bfloat16)),
    "packed in blocks": (groups(4, 32), Q4, lambda w: pack_quantized(w, group=32)),
    "packed, asymmetric": (groups(4, 16, False), None, lambda w: pack_quantized(w, group=16, symmetric=False)),
    "packed, ordered": (groups(4, 16, actorder="group"), None, lambda w: pack_quantized(w, group=16, acts=True)),
    "packed rows": (groups(4, None), INT8, lambda w: pack_quantized(w, group=0, dtype=torch.float32)),
    "packed 8 bits": (groups(8, None), INT8, lambda w: pack_quantized(w, bits=8, group=0, dtype=torch.float32)),
    "gptq": (GPTQ, Q4, lambda w: gptq(w, group=32)),
    "gptq without g_idx": (GPTQ, None, lambda w: gptq(w, group=16, bare=True)),
    "gptq, asymmetric": (GPTQ | {"sym": False}, None, lambda w: gptq(w, group=16, symmetric=False)),
    "gptq, act-order": (GPTQ | {"desc_act": True}, None, lambda w: gptq(w, group=16, acts=True)),
    "gptq, uneven": (GPTQ, None, lambda w: gptq(w, group=24)),
    "gptq rows": (GPTQ | {"group_size": -1}, Q4, lambda w: gptq(w, group=0)),
    "gptq_v2": (
        GPTQ | {"checkpoint_format": "gptq_v2"}, None, lambda w: gptq(w, group=16, symmetric=False, second=True),
    ),
    "gptq 8 bits": (GPTQ | {"bits": 8}, Q8, lambda w: gptq(w, bits=8, group=32)),
    "awq": (AWQ, None, lambda w: awq(w, group=16)),
    "awq, symmetric": (AWQ, Q4, lambda w: awq(w, group=32, symmetric=True)),
    "block fp8": (FP8 | {"weight_block_size": [24, 16]}, None, lambda w: eight_bits(w, (24, 16))),
    "block fp8, uneven": (FP8 | {"weight_block_size": [48, 24]}, None, lambda w: eight_bits(w, (48, 24))),
    "fp8": (FP8 | {"activation_scheme": "static"}, E4M3, lambda w: eight_bits(w, None)),
    "fp8 rows": (FP8, E4M3, lambda w: eight_bits(w, None, name="weight_scale", rows=True)),
    "block fp8, powers of two": (
        FP8 | {"weight_block_size": [24, 16], "scale_fmt": "ue8m0"}, None, lambda w: eight_bits(w, (24, 16), two=True),
    ),
    "float-quantized, dynamic": (DYNAMIC, E4M3, lambda w: eight_bits(w, None, name="weight_scale", rows=True)),
    "mxfp4": (
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), Q8, mxfp4,
    ),
    "nf4": (NF4, None, lambda w: four_bits(w, block=32, double=False)),
    "nf4, double": (NF4, None, lambda w: four_bits(w, block=64, double=True)),
    "torchao int8": ({"quant_method": "torchao"}, INT8, lambda w: torchao(w, bits=8, group=0, dtype=torch.float32)),
    "torchao int4": ({"quant_method": "torchao"}, None, lambda w: torchao(w, group=16, symmetric=False)),
}  # fmt: skip
"""What config.json says, the format that keeps the numbers (None: none has them), and the writer."""


@cache
def original(model: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields of a random model's config.json, and its tensors as transformers saves them."""
    with TemporaryDirectory() as folder:
        network = families.network(model) if model in families.FAMILIES else tiny.network(model)
        network.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
        return json.loads((Path(folder) / "config.json").read_text()), {
            name: one.clone() for name, one in tensors.items()
        }


def save(
    folder: Path, kind: str, *, files: int = 1, only: str = r"_proj\.", model: str = "blocks of two ranks"
) -> tuple[Path, Path]:
    """A random model in a layout, and one of the floats that this means. ``only``: in names of its matrices."""
    torch.manual_seed(0)
    made, meant = folder / "coded", folder / "floats"
    fields, dense = original(model)
    tensors, dense = dict(dense), dict(dense)
    said, _, write = KINDS[kind]
    for name in [name for name in tensors if re.search(only, name)]:
        parts, floats = write(tensors.pop(name))
        dense[name] = floats.contiguous()
        tensors |= {name.removesuffix("weight") + part: one.contiguous() for part, one in parts.items()}
    for place, more in ((made, {"quantization_config": said}), (meant, {})):
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(fields | more))
    save_file(dense, meant / "model.safetensors", {"format": "pt"})
    places = {name: f"model-{number % files}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, made / file, {"format": "pt"})
    if files == 1:
        (made / "model-0.safetensors").rename(made / "model.safetensors")
    else:
        (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return made, meant


def change(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))


def floats(weights: Mapping[str, Stored]) -> dict[str, Tensor]:
    return {name: one.dequantize() if isinstance(one, QuantizedTensor) else one for name, one in weights.items()}


load = partial(tiny.load, batch_size=2, context_length_estimate=[tiny.CHUNK])


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_checkpoint_equals_its_dequantised_model(tmp_path: Path, kind: str) -> None:
    form = KINDS[kind][1]
    for files in (1, 3) if "uneven" in kind or "packed" in kind else (1,):
        made, meant = save(tmp_path / str(files), kind, files=files)
        config = ModelConfig.from_pretrained(made)
        for shard in (None, Shard(config, Layout(2), 1)):
            loaded, expected = (load_weights(one, config, torch.float32, shard=shard) for one in (made, meant))
            kept = {one.format for one in loaded.values() if isinstance(one, QuantizedTensor)}
            assert kept == ({form} if form else set())
            assert loaded.keys() == expected.keys()
            for name, tensor in floats(loaded).items():
                other = expected[name]
                assert isinstance(other, Tensor) and torch.equal(tensor, other), name


def test_a_packed_checkpoint_loads_in_another_format(tmp_path: Path) -> None:
    """Kept if it has the numbers, else made of the floats."""
    for kind, form, exact in (("gptq", "q4_0", True), ("awq", "q8_0", False), ("gptq 8 bits", "q4_0", False)):
        made, meant = save(tmp_path / kind, kind)
        found, expected = (
            load_weights(one, ModelConfig.from_pretrained(one), torch.float32, quantization=form)[UP + "weight"]
            for one in (made, meant)
        )
        assert isinstance(found, QuantizedTensor) and isinstance(expected, QuantizedTensor)
        if exact:
            expected = load_weights(meant, ModelConfig.from_pretrained(meant), torch.float32)[UP + "weight"]  # type: ignore[assignment]
            assert torch.equal(found.dequantize(), expected)  # type: ignore[arg-type]
        else:
            assert torch.equal(found.data, expected.data)


RECORDED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "recorded_matrices.json").read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_dequantised_numbers_equal_those_of_the_library(tmp_path: Path, name: str) -> None:
    def tensor(entry: Mapping[str, Any]) -> Tensor:
        data = torch.frombuffer(bytearray(base64.b64decode(entry["data"])), dtype=torch.uint8)
        return data.view(getattr(torch, entry["dtype"])).view(entry["shape"])

    said, meant = RECORDED[name]["quantization_config"], tensor(RECORDED[name]["meant"])
    file = tmp_path / "model.safetensors"
    save_file({part: tensor(one) for part, one in RECORDED[name]["tensors"].items()}, file)
    with OpenFiles() as files:
        places = {part.removeprefix("m."): Place(file, part, info) for part, info in files(file).infos().items()}
        shape = (meant.shape[0], meant.shape[1])
        matrix = READERS[layout_of(said, "config.json").name](Parts("m.weight", places, files, shape, settings=said))
        whole, kept = matrix.floats(0, shape[0]), matrix.kept(None, blocks=True)
        assert torch.equal(whole.to(meant.dtype), meant)
        assert torch.equal(matrix.floats(3, 6), whole[3:6])
        assert kept is None or torch.equal(kept.dequantize(), whole)


@pytest.mark.parametrize(
    ("model", "kind", "only", "kept"),
    [
        ("blocks of two ranks", "gptq", r"layers\.1.*_proj", r"layers\.1.*_proj"),
        ("blocks of two ranks", "gptq", "v_proj", "nothing"),
        ("blocks of two ranks", "torchao int8", "(q|k|gate|down)_proj", "down_proj"),
        ("mixtral", "torchao int8", r"experts\.[1-9]|w2", "w2"),
        ("mixtral", "nf4", r"experts\.\d|_proj", "nothing"),
    ],
)
def test_files_with_some_matrices_in_floats_load(tmp_path: Path, model: str, kind: str, only: str, kept: str) -> None:
    """Matrices that a layer joins are kept all or none."""
    made, meant = save(tmp_path, kind, only=only, model=model)
    loaded, expected = (load_weights(one, ModelConfig.from_pretrained(one), torch.float32) for one in (made, meant))
    assert all(torch.equal(one, expected[name]) for name, one in floats(loaded).items())
    found = {name for name, one in loaded.items() if isinstance(one, QuantizedTensor)}
    assert found == {name for name in loaded if re.search(kept, name)}
    assert torch.equal(load(made).sample(PROMPTS, max_new_tokens=12), load(meant).sample(PROMPTS, max_new_tokens=12))


def test_a_rank_with_partial_blocks_gets_floats(tmp_path: Path) -> None:
    made, meant = save(tmp_path, "gptq")
    config = ModelConfig.from_pretrained(made)
    shard = Shard(config, Layout(4, GQA.REPLICATED_HEADS), 3)
    loaded, expected = (load_weights(one, config, torch.float32, shard=shard) for one in (made, meant))
    assert all(torch.equal(one, expected[name]) for name, one in floats(loaded).items())
    found = {name.split(".")[-2] for name, one in loaded.items() if isinstance(one, QuantizedTensor)}
    assert found == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}


def test_biases_of_zeros_are_dropped(tmp_path: Path) -> None:
    made, _ = save(tmp_path, "gptq")
    tensors = load_file(made / "model.safetensors")
    save_file(tensors | {UP + "bias": torch.zeros(128)}, made / "model.safetensors")
    config = ModelConfig.from_pretrained(made)
    assert UP + "bias" not in load_weights(made, config, torch.float32)
    save_file(tensors | {UP + "bias": torch.ones(128)}, made / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"expected only tensors .*up_proj\.bias"):
        load_weights(made, config, torch.float32)


WEIGHTS = QUANTIZATION_CONFIG["config_groups"]["group_0"]["weights"]
OTHERS: dict[str, dict[str, Any]] = {
    "format = 'marlin-24'": QUANTIZATION_CONFIG | {"format": "marlin-24"},
    "kv_cache_scheme.*": QUANTIZATION_CONFIG | {"kv_cache_scheme": {"num_bits": 8}},
    "config_groups that are missing": QUANTIZATION_CONFIG | {"config_groups": {}},
    **{
        words: QUANTIZATION_CONFIG | {"config_groups": {"a": group}}
        for words, group in {
            "a group without weights": {},
            ".*num_bits = 4.*": {"weights": {**WEIGHTS, "num_bits": 4}},
            ".*symmetric = False.*": {"weights": {**WEIGHTS, "symmetric": False}},
            ".*strategy = 'group'.*": {"weights": {**WEIGHTS, "strategy": "group"}},
            ".*input_activations.*": {"weights": WEIGHTS, "input_activations": {"num_bits": 8}},
        }.items()
    },
    "quant_method = 'hqq'": {"quant_method": "hqq"},
    "weights with num_bits = 2": groups(2, 32),
    "weights with strategy = 'block'": groups(4, 32, strategy="block"),
    "weights with type = 'float'": groups(4, 32, type="float"),
    "bits = 3": GPTQ | {"bits": 3},
    "checkpoint_format = 'marlin'": GPTQ | {"checkpoint_format": "marlin"},
    "version = 'gemv'": AWQ | {"version": "gemv"},
    "backend = 'llm-awq'": AWQ | {"backend": "llm-awq"},
    "load_in_8bit = True": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "bnb_4bit_quant_storage = 'bfloat16'": NF4 | {"bnb_4bit_quant_storage": "bfloat16"},
    r"weight_block_size = \[128\]": FP8 | {"weight_block_size": [128]},
    "scale_fmt = 'other'": FP8 | {"scale_fmt": "other"},
}


@pytest.mark.parametrize("words", OTHERS)
def test_unsupported_layouts_are_rejected_by_name(tmp_path: Path, words: str) -> None:
    tiny.network().config.save_pretrained(tmp_path)
    change(tmp_path, quantization_config=OTHERS[words])
    with pytest.raises(UnknownArchitectureError, match=f"quantization_config: expected .*, got {words}; use the"):
        ModelConfig.from_pretrained(tmp_path)


STATE = torch.tensor(list(b'{"blocksize": 0, "shape": [128, 64]}'), dtype=torch.uint8)
DAMAGED: list[tuple[str, dict[str, Tensor | None], type[Exception], str]] = [
    ("packed, asymmetric", {"weight_shape": None}, MissingWeightsError, "up_proj.weight_shape, got none"),
    ("packed, asymmetric", {"weight_scale": None}, MissingWeightsError, "up_proj.weight_scale, got none"),
    ("packed, asymmetric", {"weight_shape": torch.tensor([64, 128])}, CheckpointError, "the numbers 128 and 64"),
    ("packed, asymmetric", {"weight_packed": torch.zeros(128, 3).int()}, CheckpointError, "128 x 64 numbers of 4 or"),
    ("packed, asymmetric", {"weight_zero_point": torch.zeros(8, 3).int()}, CheckpointError, "points for 128 rows"),
    ("packed, asymmetric", {"weight_g_idx": torch.full((64,), 4).int()}, CheckpointError, "group of each of 64"),
    ("packed, asymmetric", {"weight_zero_point": None}, MissingWeightsError, "up_proj.weight_zero_point, got none"),
    ("packed, ordered", {"weight_g_idx": None}, MissingWeightsError, "up_proj.weight_g_idx, got none"),
    ("gptq, act-order", {"g_idx": None}, MissingWeightsError, "up_proj.g_idx, got none"),
    ("gptq", {"qweight": torch.zeros(12, 128).int()}, CheckpointError, "64 x 128 numbers of 4 or 8 bits"),
    ("gptq", {"qzeros": torch.zeros(3, 16).int()}, CheckpointError, "zero points for 128 rows of 2 groups"),
    ("gptq", {"scales": torch.zeros(2, 64)}, CheckpointError, "scales of groups for 128 rows"),
    ("gptq", {"scales": torch.full((2, 128), torch.inf)}, WeightValueError, "a finite scale for each of 128 rows"),
    ("gptq", {"scales": torch.ones(2, 128).int()}, CheckpointError, "expected scales that are floats, got I32"),
    ("awq", {"scales": torch.ones(4, 128).int()}, CheckpointError, "expected scales that are floats, got I32"),
    ("packed", {"weight_scale": torch.ones(128, 4).int()}, CheckpointError, "expected scales that are floats"),
    ("fp8", {"weight_scale_inv": torch.ones(1).int()}, CheckpointError, "expected scales that are floats"),
    ("torchao int8", {"_weight_scale": torch.ones(128, 1).int()}, CheckpointError, "expected scales that are floats"),
    ("awq", {"qweight": torch.zeros(64, 8).int()}, CheckpointError, "64 x 128 numbers of 4 bits"),
    ("awq", {"qzeros": None}, MissingWeightsError, "up_proj.qzeros, got none"),
    ("block fp8", {"weight_scale_inv": torch.ones(6, 5)}, CheckpointError, "a scale for each block of 24 x 16"),
    ("fp8", {"weight_scale_inv": torch.zeros(())}, WeightValueError, "a positive scale for each of 128 rows"),
    ("mxfp4", {"weight_scale": torch.full((128, 2), 255).byte()}, WeightValueError, "a finite scale for each of 128"),
    ("nf4", {"weight.quant_state.bitsandbytes__nf4": torch.zeros(9).byte()}, CheckpointError, "expected JSON"),
    ("nf4", {"weight.quant_map": torch.ones(8)}, CheckpointError, r"expected F32 of shape \[16\]"),
    ("nf4", {"weight.absmax": torch.ones(100)}, CheckpointError, r"of shape \[256\], got F32"),
    ("nf4", {"weight": torch.zeros(9, 1).byte()}, CheckpointError, "expected bytes of a matrix"),
    ("nf4", {"weight.absmax": torch.ones(256).byte()}, CheckpointError, "expected a nested_blocksize above zero"),
    ("nf4", {"weight.quant_state.bitsandbytes__nf4": STATE}, CheckpointError, "expected a blocksize above zero"),
    ("nf4", {"weight.quant_state.bitsandbytes__nf4": torch.ones(9)}, CheckpointError, "expected JSON"),
    ("nf4, double", {"weight.absmax": torch.ones(128)}, CheckpointError, r"expected U8 of shape \[128\]"),
    ("nf4, double", {"weight.nested_absmax": None}, MissingWeightsError, "weight.nested_absmax, got none"),
    ("nf4, double", {"weight.nested_quant_map": torch.ones(9)}, CheckpointError, r"expected F32 of shape \[256\]"),
    ("torchao int4", {"_weight_qdata": torch.zeros(128, 32).byte()}, UnknownArchitectureError, "tensors of int8 or"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "parts", "error", "words"), DAMAGED)
def test_damaged_packed_checkpoints_are_rejected(
    tmp_path: Path, kind: str, parts: dict[str, Tensor | None], error: type[Exception], words: str
) -> None:
    made, _ = save(tmp_path, kind)
    whole = load_file(made / "model.safetensors") | {UP + part: one for part, one in parts.items()}
    save_file({name: one for name, one in whole.items() if one is not None}, made / "model.safetensors")
    with pytest.raises(error, match=words):
        load_weights(made, ModelConfig.from_pretrained(made), torch.float32)


@pytest.mark.parametrize(
    ("kind", "said", "words"),
    [
        ("gptq", GPTQ | {"bits": 8}, "numbers of 8 bits in groups of None"),
        ("gptq", GPTQ | {"group_size": 16}, "numbers of 4 bits in groups of 16"),
        ("gptq", GPTQ | {"group_size": -1}, "numbers of 4 bits in groups of -1"),
        ("awq", AWQ | {"group_size": 32}, "numbers of 4 bits in groups of 32"),
        ("packed", groups(8, 16), "numbers of 8 bits in groups of 16"),
        ("packed", groups(4, 32), "numbers of 4 bits in groups of 32"),
    ],
)
def test_settings_that_contradict_the_tensors_are_refused(
    tmp_path: Path, kind: str, said: dict[str, Any], words: str
) -> None:
    made, _ = save(tmp_path, kind)
    change(made, quantization_config=said)
    with pytest.raises(CheckpointError, match=f"expected {words}, as quantization_config says, got I32"):
        load_weights(made, ModelConfig.from_pretrained(made), torch.float32)


def test_families_with_transposed_matrices_are_rejected_by_name(tmp_path: Path) -> None:
    families.network("gpt2").save_pretrained(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "transformer.h.0.mlp.c_fc."
    parts, _ = gptq(tensors.pop(name + "weight").t(), group=16)
    save_file(tensors | {name + part: one for part, one in parts.items()}, tmp_path / "model.safetensors")
    change(tmp_path, quantization_config=GPTQ)
    with pytest.raises(UnknownArchitectureError, match=r"stores its matrices as \[in, out\], got gptq"):
        load(tmp_path)


def test_every_layout_has_a_reader() -> None:
    assert [row.name for row in LAYOUTS] == list(dict.fromkeys(row.name for row in LAYOUTS))
    assert {row.name for row in LAYOUTS} == READERS.keys()
