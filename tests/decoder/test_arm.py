"""Kernels compiled for ARM (NEON), in an emulator: they come to the bits of this machine's."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.decoder import environment
from paceline.decoder.native import build, compiler
from tests.decoder.other_kernels import Argument, Call, attentions, called, numbers, products, quantised_products

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
DRIVER = Path(__file__).with_name("arm_driver.cpp")

pytestmark = [
    pytest.mark.arm,
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
        reason=f"{COMPILER} or {EMULATOR} is missing (Debian: apt install g++-aarch64-linux-gnu qemu-user)",
    ),
]

Emulated = Callable[..., list[Tensor]]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """A call of a kernel in the emulator -> the bytes of its tensors afterwards."""
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
        return [part.view(one.view(torch.uint8).shape) for part, one in zip(found, tensors, strict=True)]

    return call


def noise() -> Iterator[Call]:
    yield "paceline_gumbel", (torch.tensor([1, 2, 3, 4], dtype=torch.int32), 5, 0, torch.zeros(4096), 4096)


def choices() -> Iterator[Call]:
    positions = torch.arange(15, dtype=torch.int32).view(3, 5)
    params = torch.tensor([[0.0, 0, 1, 0], [0.7, 50, 0.9, 0.05], [1.0, 0, 1, 0]])
    keys, out = torch.arange(12, dtype=torch.int32).view(3, 4), torch.zeros(3, 5, dtype=torch.int32)
    yield "paceline_choose", (numbers(3, 5, 1000), positions, params, keys, out, 3, 5, 1000, 0)


CALLS: dict[str, Callable[[], Iterator[Call]]] = {
    **{f"products {shape}": partial(products, shape, (1, 5, 9, 17, 40)) for shape in ((7, 5), (33, 19), (384, 37))},
    **{
        f"quantised products {shape}": partial(quantised_products, shape, (1, 5, 9, 17))
        for shape in ((32, 5), (1056, 19))
    },
    **{
        f"attention {width}, {tree}": partial(attentions, width, tree=tree)
        for width in (12, 64)
        for tree in (False, True)
    },
    "noise": noise,
    "choice": choices,
}


@pytest.mark.parametrize("name", CALLS)
def test_kernels_for_arm_give_the_bits_of_this_machine(emulated: Emulated, name: str) -> None:
    for kernel, arguments in CALLS[name]():
        for there, own in zip(emulated(kernel, *arguments), called(build.library(), kernel, *arguments), strict=True):
            assert torch.equal(there, own)
