"""Quantised matrices: their numbers, the products with them, and models that are loaded with them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from paceline.core.errors import ConfigurationError
from paceline.decoder.kernels.protocol import CachePosition
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.native.ops import Native
from paceline.decoder.parallel.sharding import Layout, Shard
from paceline.decoder.weights.checkpoint import load_weights
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import PackedMatrix, QuantizedTensor, quantize
from paceline.neuron.kernels import TraceableKernels
from tests.decoder import families, gguf_files, tiny

FORMATS = list(WeightFormat)
BLOCKS = [form for form in FORMATS if form.block_bytes]


def weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))


load = partial(tiny.load, amp="bf16", n_positions=tiny.POSITIONS, context_length_estimate=tiny.CHUNK)


@pytest.fixture(scope="module")
def folder(workshop: tiny.Workshop) -> Path:
    """A model whose matrices have rows of whole blocks."""
    return workshop.checkpoint(kind="blocks")


@pytest.mark.parametrize("form", BLOCKS, ids=lambda form: form.value)
def test_blocks_equal_those_of_the_gguf_package(form: WeightFormat) -> None:
    original = weight(8, 96)
    stored = quantize(original, form)
    kind = gguf.GGMLQuantizationType[form.name]
    assert np.array_equal(stored.data.numpy(), gguf.quants.quantize(original.numpy(), kind))
    assert np.array_equal(stored.dequantize().numpy(), gguf.quants.dequantize(stored.data.numpy(), kind))


def test_int8_error_is_at_most_half_a_scale_and_zero_rows_stay_zero() -> None:
    original = weight(8, 50)
    original[3] = 0
    stored = quantize(original, WeightFormat.INT8)
    assert stored.scales is not None
    error = (stored.dequantize() - original).abs()
    assert bool((error <= stored.scales.unsqueeze(1) * 0.5001).all())
    assert not stored.dequantize()[3].any()


def test_fp8_error_is_within_its_mantissa() -> None:
    """Half a step of the last bit of a normal number, or of the least subnormal one."""
    form = WeightFormat.FP8_E4M3
    original = weight(8, 500) * torch.logspace(-3, 0, 500)
    stored = quantize(original, form)
    assert stored.scales is not None and stored.data.dtype is form.dtype
    facts = torch.finfo(form.dtype)
    error = (stored.dequantize() - original).abs()
    assert bool((error <= torch.maximum(original.abs() * facts.eps / 2, stored.scales[:, None] * facts.tiny)).all())
    largest = stored.dequantize().abs().amax(1)
    torch.testing.assert_close(largest, original.abs().amax(1))  # the whole range is used


def test_every_fp8_number_is_widened_exactly() -> None:
    """All patterns of bits that are numbers, in full vectors and after the last one."""
    form = WeightFormat.FP8_E4M3
    every = torch.arange(256, dtype=torch.uint8).view(form.dtype)
    every = every[torch.isfinite(every.float())]
    for width in (16, 3):  # a vector, and single numbers
        data = torch.zeros(len(every), width, dtype=form.dtype)
        data[:, -1] = every
        packed = PackedMatrix(QuantizedTensor(data, torch.ones(len(every)), form, width))
        x = torch.ones(1, 1, width)
        assert torch.equal(Native().linear(x, packed)[0, 0], every.float())
        assert torch.equal(TraceableKernels().linear(x, packed)[0, 0], every.float())


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.value)
@pytest.mark.parametrize(("rows", "columns"), [(40, 64), (33, 96), (3, 32), (128, 256)])
def test_a_quantised_matmul_is_near_the_dequantised_one(form: WeightFormat, rows: int, columns: int) -> None:
    """Activations become integers with integers and blocks: half a step of each, times its weight."""
    packed = PackedMatrix(quantize(weight(rows, columns), form))
    x, native = weight(23, columns).view(1, 23, columns), Native()
    found, dequantized = native.linear(x, packed), packed.dequantize()
    exact = x.double() @ dequantized.double().T
    room = x.abs().double() @ dequantized.abs().double().T * (columns + 3) * 2.0**-24  # any order of summing
    if form is not WeightFormat.FP8_E4M3:
        step = x.abs().double().amax(2, keepdim=True) / (32767 if form.block_bytes else 16383)
        room += step * 0.51 * dequantized.abs().double().sum(1)
    for product in (found, TorchKernels().linear(x, packed)):
        assert bool(((product - exact).abs() <= room).all())


def test_accelerator_graphs_scale_int8_sums_and_reject_blocks() -> None:
    original, x = weight(40, 64), weight(5, 64).view(1, 5, 64)
    packed = PackedMatrix(quantize(original, WeightFormat.INT8))
    torch.testing.assert_close(
        TraceableKernels().linear(x, packed), TorchKernels().linear(x, packed), rtol=2e-2, atol=1e-1
    )
    with pytest.raises(ConfigurationError, match=r"do not support q4_0 blocks; use quantization='int8'"):
        TraceableKernels().linear(x, PackedMatrix(quantize(original, WeightFormat.Q4_0)))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.value)
def test_an_embedding_is_a_row_of_the_dequantised_table(form: WeightFormat) -> None:
    packed = PackedMatrix(quantize(weight(96, 32), form))
    ids = torch.tensor([[0, 95, 7], [7, 1, 2]], dtype=torch.int32)
    assert torch.equal(packed.gather(ids), packed.dequantize()[ids.long()])


def test_every_matrix_is_quantised_and_nothing_else(folder: Path) -> None:
    config = ModelConfig.from_pretrained(folder)
    plain = load_weights(folder, config, torch.float32)
    for form in FORMATS:
        for name, tensor in load_weights(folder, config, torch.float32, quantization=form.value).items():
            original = plain[name]
            assert isinstance(original, torch.Tensor)
            if original.dim() == 1:
                assert isinstance(tensor, torch.Tensor) and torch.equal(tensor, original)
            else:
                assert isinstance(tensor, QuantizedTensor)
                assert torch.equal(tensor.dequantize(), quantize(original, form).dequantize())


@pytest.mark.parametrize("form", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("degree", [2, 4])
def test_ranks_hold_shards_of_one_quantised_matrix(folder: Path, degree: int, form: str) -> None:
    config = ModelConfig.from_pretrained(folder)
    whole = load_weights(folder, config, torch.float32, quantization=form)
    shards = [Shard(config, Layout(degree), rank) for rank in range(degree)]
    if degree > config.num_kv_heads:
        shards = [Shard(config, Layout(degree, shards[0].layout.gqa.REPLICATED_HEADS), r) for r in range(degree)]
    parts = [load_weights(folder, config, torch.float32, shard=shard, quantization=form) for shard in shards]
    for name, dim in (("mlp.down_proj", 1), ("mlp.up_proj", 0), ("self_attn.o_proj", 1), ("self_attn.q_proj", 0)):
        name = f"model.layers.0.{name}.weight"
        joined = torch.cat([part[name].dequantize() for part in parts], dim)
        assert torch.equal(joined, whole[name].dequantize())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_K"])
def test_a_gguf_file_is_kept_as_it_is(tmp_path: Path, kind: str) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", gguf_files.network(), gguf.GGMLQuantizationType[kind])
    kept, plain = load(path, quantization="gguf", amp="f32"), load(path, amp="f32")
    packed = [module for module in kept.body.modules() if isinstance(module, PackedMatrix)]
    assert {module.format.name for module in packed} == {kind if kind in WeightFormat.__members__ else "Q8_0"}
    if kind != "Q5_K":  # whose matrices were quantised a second time
        prompt = [[5, 6, 7, 8]]
        assert torch.equal(kept.sample(prompt, max_new_tokens=12), plain.sample(prompt, max_new_tokens=12))
        assert torch.equal(packed[0].dequantize(), plain.body.model.embedding.detach())


def test_a_gguf_file_may_mix_formats_in_attention(tmp_path: Path) -> None:
    network = gguf_files.network()
    values = network.state_dict()["model.layers.0.self_attn.v_proj.weight"].half().numpy()
    extra = {"blk.0.attn_v.weight": values}
    path = gguf_files.write(tmp_path / "a.gguf", network, gguf.GGMLQuantizationType.Q4_0, extra=extra)
    layers = load(path, quantization="gguf", amp="f32").body.model.layers
    assert [layer.attention.qkv.format for layer in layers][:2] == [WeightFormat.Q8_0, WeightFormat.Q4_0]


def test_a_gguf_file_is_quantised_again_on_request(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", gguf_files.network(), gguf.GGMLQuantizationType.Q8_0)
    kept, anew = load(path, quantization="gguf"), load(path, quantization="q4_0")
    for one, form in ((kept, WeightFormat.Q8_0), (anew, WeightFormat.Q4_0)):
        assert {module.format for module in one.body.modules() if isinstance(module, PackedMatrix)} == {form}
    stored, found = (next(m for m in one.body.modules() if isinstance(m, PackedMatrix)) for one in (kept, anew))
    assert torch.equal(found.data, quantize(stored.dequantize(), WeightFormat.Q4_0).data)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in families.NEAR else ()) for name in families.FAMILIES],
)
def test_every_family_quantises_along_its_matmuls(tmp_path: Path, name: str) -> None:
    """A wrong order of rows gives logits that have nothing to do with those of the model."""
    families.network(name).save_pretrained(tmp_path)
    tokens = torch.arange(12, dtype=torch.int32).view(1, 12)
    first, count = torch.zeros(1, dtype=torch.int32), torch.full((1,), 12, dtype=torch.int32)
    found = []
    for quantization in (None, "int8"):
        body = tiny.load(tmp_path, quantization=quantization).body
        with torch.inference_mode():
            hidden, _ = body(tokens, CachePosition(first, count, first, families.POSITIONS))
            found.append(body.logits(hidden).flatten())
    assert torch.corrcoef(torch.stack(found))[0, 1] > 0.99
