"""The copy of PyTorch's header that compiles quickly: it is made for this version, it is found, it reads the same."""

from __future__ import annotations

import ctypes
import inspect
import subprocess
from pathlib import Path

import pytest
from torch._inductor import codecache

from paceline.core.errors import BackendError
from paceline.decoder import environment
from paceline.decoder.backends import inductor
from paceline.decoder.compile import torch_headers
from paceline.decoder.compile.torch_headers import INCLUDE
from paceline.decoder.native import build
from tests.decoder.test_compiled import Looking, graph

HEADER = "torch/csrc/inductor/aoti_runtime/model_base.h"
PROGRAM = f"""
#include <{HEADER}>

extern "C" int parse(const char* name, int* kind, int* number) {{
  try {{
    torch::aot_inductor::parse_device_str(name, *kind, *number);
    return 0;
  }} catch (const std::exception&) {{
    return 1;
  }}
}}
"""
# Of the kinds, PyTorch's `DeviceType`: 0 is the CPU and 1 is CUDA.
NAMES = {"cpu": (0, -1), "cpu:0": (0, 0), "cuda": (1, -1), "cuda:12": (1, 12)}
REFUSED = ["", ":", "cpu:", "cpu:x", "cuda:1:2", "cuda:-1", "cuda 1", "tpu", "Cpu", "cpu "]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("headers") / "parse.cpp"
    path.write_text(PROGRAM)
    return path


def command(*more: str) -> list[str]:
    """As Inductor calls the compiler: PyTorch's folder by -I."""
    return [build.require_compiler(), "-std=c++20", "-O0", "-fPIC", f"-I{INCLUDE}", *more]


def test_a_copy_is_made_of_this_version_s_header_and_is_what_the_compiler_reads(source: Path) -> None:
    copy, theirs = torch_headers.include_folders()
    assert theirs == INCLUDE
    with environment.inductor_scratch([copy, theirs]):
        read = subprocess.run(command("-M", str(source)), capture_output=True, text=True, check=True).stdout.split()
    assert str(copy / HEADER) in read
    assert str(INCLUDE / HEADER) not in read
    assert str(INCLUDE / "torch/csrc/inductor/aoti_runtime/utils.h") in read


def test_names_of_devices_are_read_as_by_pytorch(source: Path) -> None:
    library = source.with_suffix(".so")
    lib = INCLUDE.parent / "lib"
    link = ["-shared", "-L", str(lib), "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"]
    with environment.inductor_scratch(torch_headers.include_folders()):
        subprocess.run(command(str(source), "-o", str(library), *link), check=True)
    parse = ctypes.CDLL(str(library)).parse
    kind, number = ctypes.c_int(), ctypes.c_int()
    for name, expected in NAMES.items():
        assert parse(name.encode(), ctypes.byref(kind), ctypes.byref(number)) == 0
        assert (kind.value, number.value) == expected, name
    assert {name: parse(name.encode(), ctypes.byref(kind), ctypes.byref(number)) for name in REFUSED} == dict.fromkeys(
        REFUSED, 1
    )


def test_another_text_is_left_as_it_is() -> None:
    text = (INCLUDE / HEADER).read_text()
    made = torch_headers.quick(text)
    assert made is not None and "regex" not in made
    assert torch_headers.quick(text.replace("std::smatch sm;", "std::smatch parts;")) is None
    assert torch_headers.quick(text + "\nstd::regex other;\n") is None
    assert torch_headers.quick("") is None


def test_precompiled_headers_go_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("_HEADER_DIR", "_HEADER_LOCK_DIR")
    for name in names:
        monkeypatch.setattr(codecache, name, getattr(codecache, name))  # is put back behind this test
        assert name in inspect.getsource(codecache._precompile_header)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    with pytest.raises(BackendError):  # when it is traced, before anything is compiled
        inductor._compile(graph(Looking()), tmp_path / "graph")
    assert all(Path(getattr(codecache, name)).is_relative_to(tmp_path / "headers") for name in names)
