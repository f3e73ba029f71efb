"""Kernels compiled for ARM (NEON), in an emulator: they come to the bits of this machine's."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.decoder import environment
from paceline.decoder.native import build, compiler
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import quantize
from tests.decoder.other_kernels import call

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
DRIVER = Path(__file__).with_name("arm_driver.cpp")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = [
    pytest.mark.arm,
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
        reason=f"{COMPILER} or {EMULATOR} is missing (Debian: apt install g++-aarch64-linux-gnu qemu-user)",
    ),
]

Argument = Tensor | int | float | None
Emulated = Callable[..., list[Tensor]]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """A call of a kernel in the emulator -> its tensors afterwards."""
    folder = tmp_path_factory.mktemp("arm")
    kernels, program = folder / "kernels.so", folder / "driver"
    compiler.compile_libraries({kernels: compiler.KERNELS}, COMPILER, cores=environment.cores(), report=lambda *_: None)
    subprocess.run([COMPILER, "-O1", "-std=c++17", "-rdynamic", DRIVER, "-o", program], check=True)

    def call(name: str, *arguments: Argument) -> list[Tensor]:
        given = struct.pack("<q", len(name)) + name.encode() + struct.pack("<q", len(arguments))
        tensors = [one for one in arguments if isinstance(one, Tensor)]
        for one in arguments:
            if isinstance(one, Tensor):
                data = ctypes.string_at(one.data_ptr(), one.nbytes)
                given += struct.pack("<qq", 2, len(data)) + data
            elif isinstance(one, float):
                given += struct.pack("<qf4x", 1, one)
            else:
                given += struct.pack("<qq", 0, one or 0)
        command = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", program, kernels]
        made = subprocess.run(command, input=given, capture_output=True, check=True).stdout
        found = torch.frombuffer(bytearray(made), dtype=torch.uint8).split([one.nbytes for one in tensors])
        return [part.clone().view(one.dtype).view(one.shape) for part, one in zip(found, tensors, strict=True)]

    return call


def here(name: str, *arguments: Argument) -> list[Tensor]:
    own = [one.clone() if isinstance(one, Tensor) else one for one in arguments]
    call(build.library(), name, *own)
    return [one for one in own if isinstance(one, Tensor)]


def agree(emulated: Emulated, name: str, *arguments: Argument) -> None:
    for there, own in zip(emulated(name, *arguments), here(name, *arguments), strict=True):
        assert torch.equal(there.view(torch.uint8), own.view(torch.uint8))


@pytest.mark.parametrize("rows", [1, 5, 9, 17, 40])
@pytest.mark.parametrize("shape", [(7, 5), (33, 19), (384, 37)])
def test_products(emulated: Emulated, shape: tuple[int, int], rows: int) -> None:
    K, N = shape
    torch.manual_seed(0)
    for code, dtype in enumerate(DTYPES):
        weight = torch.randn(N, K).to(dtype)
        agree(emulated, "paceline_linear", torch.randn(rows, K), weight, None, torch.zeros(rows, N), rows, K, N, code)


@pytest.mark.parametrize("form", WeightFormat, ids=lambda form: form.value)
@pytest.mark.parametrize("shape", [(32, 5), (1056, 19)])
def test_products_with_quantised_matrices(emulated: Emulated, shape: tuple[int, int], form: WeightFormat) -> None:
    K, N = shape
    torch.manual_seed(0)
    stored = quantize(torch.randn(N, K), form)
    for rows in (1, 5, 9, 17):
        x, sizes = torch.randn(rows, K), (rows, K, N, form.code)
        agree(emulated, "paceline_linear", x, stored.data, stored.scales, torch.zeros(rows, N), *sizes)


@pytest.mark.parametrize("code", range(3))
@pytest.mark.parametrize("width", [12, 64])
@pytest.mark.parametrize("tree", [False, True])
def test_attention(emulated: Emulated, tree: bool, width: int, code: int) -> None:
    heads, groups, rows = 6, 2, 40
    torch.manual_seed(0)
    cache = [torch.randn(1, groups, rows, width).to(DTYPES[code]) for _ in range(2)]
    for window, row in ((1, 17), (5, 23), (9, 8)):
        q, k, v = (torch.randn(1, window, n, width) for n in (heads, groups, groups))
        place = [torch.tensor([n], dtype=torch.int32) for n in (row, window, 0)]
        parents = torch.tensor([[-1, *(i // 2 for i in range(window - 1))]], dtype=torch.int32) if tree else None
        sizes, out = torch.tensor([1, window, heads, groups, width, rows, 0]), torch.zeros(1, window, heads * width)
        agree(emulated, "paceline_attend", q, k, v, *cache, out, *place, parents, sizes, code, 0, 0.0, None)


def test_noise_and_choice(emulated: Emulated) -> None:
    torch.manual_seed(0)
    seed = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    agree(emulated, "paceline_gumbel", seed, 5, 0, torch.zeros(4096), 4096)
    logits, positions = torch.randn(3, 5, 1000), torch.arange(15, dtype=torch.int32).view(3, 5)
    params = torch.tensor([[0.0, 0, 1, 0], [0.7, 50, 0.9, 0.05], [1.0, 0, 1, 0]])
    keys, out = torch.arange(12, dtype=torch.int32).view(3, 4), torch.zeros(3, 5, dtype=torch.int32)
    agree(emulated, "paceline_choose", logits, positions, params, keys, out, 3, 5, 1000, 0)
