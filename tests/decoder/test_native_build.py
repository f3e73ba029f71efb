"""Sources of the native libraries: the package, the cache, or a build, whatever is wrong with these."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from paceline.core.errors import BackendError, StorageError
from paceline.decoder import environment
from paceline.decoder.compile import cache
from paceline.decoder.native import build, compiler
from paceline.decoder.native.compiler import Library
from tests.full_disk import full_disk

V3 = frozenset(
    {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave", "popcnt", "sse4_2", "ssse3", "sse2"}
)
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library of one function, and a cold cache."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "tiny.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    return Library("tiny", {str(source): 1.0}, "", ("-fPIC",))


def answer(library: Library, *ready: Path) -> int:
    loaded: int = build.load([(library, ready)])[0].answer()
    return loaded


def cached() -> list[Path]:
    return list((environment.cache_root() / "native").glob("*/tiny.so"))


def stub(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


# ------------------------------------------------------------------------------------------------- with the package --


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (frozenset({"sse2", "avx", "fpu"}), []),
        (V3, ["x86-64-v3"]),
        (V3 | {"avx512f", "avx512_bf16"}, ["x86-64-v3"]),  # AVX-512 without all of it
        (V4, ["x86-64-v4", "x86-64-v3"]),
        (V4 | {"avx512_vnni"}, ["x86-64-v4", "x86-64-v3"]),
        (V4 | {"avx512_bf16", "avx512_vnni", "amx_tile"}, ["x86-64-v4-bf16", "x86-64-v4", "x86-64-v3"]),
    ],
)
def test_the_fastest_kernels_that_a_processor_can_run_come_first(
    flags: frozenset[str], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [one.name for one in compiler.fitting(flags)] == names
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path)
    assert build.prebuilt(flags) == []  # a checkout
    for one in compiler.PROCESSORS:
        (tmp_path / f"kernels-{one.name}.so").touch()
    assert [path.name for path in build.prebuilt(flags)] == [f"kernels-{name}.so" for name in names]


def test_a_packaged_library_needs_no_compiler_and_no_cache(
    tiny: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(tiny)
    (made,) = cached()
    ready = made.rename(tmp_path / "ready.so")
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "other"))
    assert answer(tiny, ready) == 42
    assert not (tmp_path / "other").exists()


def test_a_library_that_does_not_load_is_built(tiny: Library, tmp_path: Path) -> None:
    strange = tmp_path / "strange.so"
    strange.write_bytes(b"\x7fELF of another system")
    assert answer(tiny, strange) == 42
    assert cached()


# --------------------------------------------------------------------------------------------------------- the cache --


def test_kernels_depend_on_sources_flags_and_the_machine_and_not_on_pytorch() -> None:
    facts = build.facts(build.NATIVE)
    assert {"source", "flags", "cpu", "machine"} <= facts.keys() and "torch" not in facts
    assert facts != build.facts(build.NATIVE.with_flags("-O0"))


def test_another_version_is_built_next_to_it(tiny: Library, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(tiny) == 42
    (source,) = map(Path, tiny.sources)
    source.write_text('extern "C" int answer() { return 43; }\n')
    assert answer(tiny) == 43 and len(cached()) == 2
    assert capsys.readouterr().err.count("Building kernels for this CPU: 0 of 1 files\n") == 2
    assert answer(tiny) == 43
    assert not capsys.readouterr().err, "it is in the cache"


@pytest.mark.parametrize("damage", ["empty", "cut off", "junk"])
def test_a_damaged_library_is_built_again(tiny: Library, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = build._build(
        [tiny], environment.cache_root() / "native"
    )  # and not loaded: that would find it by its path
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut off": whole[: len(whole) * 3 // 4], "junk": b"no library" * 99}[damage])
    assert answer(tiny) == 42
    assert f"{path} is damaged" in capsys.readouterr().err
    assert path.read_bytes() == whole


def test_leftovers_of_a_killed_build_are_removed(tiny: Library) -> None:
    root = environment.cache_root() / "native"
    left = root / f"{cache.key(build.facts(tiny))}.left"
    left.mkdir(parents=True)
    (left / "tiny.tiny.o").touch()
    assert answer(tiny) == 42
    assert not left.exists() and len(cached()) == 1


def test_an_unwritable_cache_falls_back_to_another_folder(
    tiny: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    assert answer(tiny) == 42
    said = capsys.readouterr().err
    assert "cannot be written" in said and "PACELINE_CACHE" in said and "for this process alone" in said
    assert not list((tmp_path / "temporary").iterdir()), "a loaded library needs its file no more"


def test_a_build_without_a_writable_folder_is_reported(tiny: Library) -> None:
    with full_disk(200), pytest.raises(StorageError, match=r"cannot be written .*make room"):
        answer(tiny)


def test_a_process_waits_for_another_build(tmp_path: Path) -> None:
    facts: dict[str, object] = {"kind": "test"}
    told, drafts = threading.Event(), []

    def wait() -> None:
        with cache.making(tmp_path, facts, waiting=told.set) as draft:
            drafts.append(draft)

    with FileLock(tmp_path / f"{cache.key(facts)}.lock"):
        other = threading.Thread(target=wait)
        other.start()
        assert told.wait(60) and not drafts
        (tmp_path / cache.key(facts)).mkdir()
        (tmp_path / cache.key(facts) / cache.MANIFEST).write_text("{}")
    other.join(60)
    assert drafts == [None], "what the other one made is taken"


# ------------------------------------------------------------------------------------------------------ the compiler --


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo the reason >&2; exit 3", r"compiler ended with 3; .*\n.*tiny.cpp.*\nthe reason"),
        ("kill -9 $$", "was killed by signal 9; .*free memory"),
    ],
)
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    tiny: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("CXX", stub(tmp_path, script))
        with pytest.raises(BackendError, match=f"building .*tiny.cpp failed: .*{said}"):
            answer(tiny)
    assert not cached()
    assert answer(tiny) == 42


def test_a_missing_compiler_is_reported_in_one_line(
    tiny: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(BackendError, match=r"on PATH, got neither; install g\+\+.*set CXX.*backend='eager'") as error:
        answer(tiny)
    assert "\n" not in str(error.value)


def test_files_are_compiled_in_parallel_longest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    script = f'for one in "$@"; do case "$one" in *.cpp) echo "${{one##*/}}" >> {log};; esac; done\nexec g++ "$@"'
    sources = {"short": 1.0, "long": 9.0, "middle": 3.0}
    for name in sources:
        (tmp_path / f"{name}.cpp").write_text(f'extern "C" int is_{name}() {{ return 1; }}\n')
    library = Library("three", {str(tmp_path / f"{name}.cpp"): cost for name, cost in sources.items()}, "", ("-fPIC",))
    shares: list[tuple[int, float]] = []
    made = tmp_path / "three.so"
    compiler.compile_libraries({made: library}, stub(tmp_path, script), cores=1, report=lambda *one: shares.append(one))
    assert log.read_text().split() == ["long.cpp", "middle.cpp", "short.cpp"]
    assert shares == [(1, 9 / 13), (2, 12 / 13), (3, 1)]
    assert ctypes.CDLL(str(made)).is_middle() == 1 and sorted(one.suffix for one in tmp_path.glob("three*")) == [".so"]


@pytest.mark.parametrize(("usual", "asked", "found"), [(4, None, 2), (3, None, 3), (4, "4", 4)])
def test_kernels_take_the_physical_cores_of_the_affinity(
    usual: int, asked: str | None, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four hardware threads of two cores, unless the process or OMP_NUM_THREADS has set another number."""
    for one in range(8):
        folder = tmp_path / f"cpu{one}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{one % 4},{one % 4 + 4}\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 4, 5}, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert environment.threads(usual, tmp_path) == found
    assert environment.threads(4, tmp_path / "absent") == 4


@pytest.mark.parametrize(("own", "found"), [("", "False"), ("torch.set_num_threads(2)", "True")])
def test_a_number_that_the_process_has_set_is_known(own: str, found: str) -> None:
    """Also where it equals PyTorch's own choice."""
    script = f"import torch\n{own}\nfrom paceline.decoder.environment import threads_are_set\nprint(threads_are_set(2))"
    env = environment.with_variables({"OMP_NUM_THREADS": "2"})
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == found
