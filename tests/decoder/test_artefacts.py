"""The cache of compiled things: complete or absent, built once, whichever process fails or dies in between."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.core.errors import ArtefactError, BackendError
from paceline.decoder.backends.base import Graph, Step
from paceline.decoder.compile import cache
from paceline.decoder.graph_key import GraphKey
from tests.decoder.tiny import Workshop, fresh

FACTS: dict[str, object] = {"kind": "test", "shape": [1, 2]}

KILLED = """
import os, sys
from pathlib import Path
from paceline.decoder.compile import cache

def build(folder):
    (folder / "half").write_text("x")
    os._exit(9)

cache.ensure(Path(sys.argv[1]), {"kind": "test", "shape": [1, 2]}, build)
"""

RIVAL = """
import sys, time
from pathlib import Path
from paceline.decoder.compile import cache

root, me = Path(sys.argv[1]), sys.argv[2]

def build(folder):
    deadline = time.monotonic() + 120
    while not ((root / "ready 1").exists() and (root / "ready 2").exists()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.5)  # the other one has its chance now
    with (root / "builds").open("a") as log:
        log.write(me)
    (folder / "made").write_text(me)

(root / f"ready {me}").touch()
folder = cache.ensure(root / "cache", {"kind": "test"}, build)
print((folder / "made").read_text())
"""


def started(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)


def made(folder: Path) -> None:
    (folder / "thing").write_text("whole")


def never(folder: Path) -> None:
    raise AssertionError("it is in the cache")


def test_a_built_artefact_is_found_and_not_built_again(tmp_path: Path) -> None:
    facts = {**FACTS, **cache.machine_facts(), "source": cache.source_hash()}
    assert cache.find(tmp_path, facts) is None and facts["torch"] == torch.__version__
    folder = cache.ensure(tmp_path, facts, made)
    assert (folder / "thing").read_text() == "whole" and folder.name == cache.key(facts)
    assert json.loads((folder / cache.MANIFEST).read_text()) == facts
    assert cache.find(tmp_path, facts) == cache.ensure(tmp_path, dict(reversed(facts.items())), never) == folder


def test_sources_of_every_folder_with_a_network_are_part_of_the_key() -> None:
    """A folder that is forgotten leaves stale graphs, so the package is searched for modules that can be traced."""
    root = Path(__file__).parents[2]
    hashed = {folder.name for folder in cache.source_folders()}
    assert {"core", "decoder", "neuron", "target", "draft", "medusa", "eagle"} <= hashed
    packages = {path.parts[len(root.parts)] for path in root.glob("[!.]*/**/__init__.py")} - {"tests", "build"}
    for name in packages - hashed:
        traced = [path for path in (root / name).rglob("*.py") if "nn.Module):" in path.read_text()]
        # Not traced: the self-test, whose graphs are compared within a run, and a model for transformers' own loops.
        others = [path for path in traced if not {"checks", "huggingface"} & set(path.parts)]
        assert not others, f"graphs may be traced from {others}"


def test_sources_outside_the_package_are_part_of_the_key() -> None:
    class Toy(torch.nn.Module):
        pass

    assert cache.outside_sources(torch.nn.Linear(1, 1)) == {}
    found = cache.outside_sources(torch.nn.Sequential(Toy()))
    assert list(found) == [__name__]
    holder = torch.nn.Identity()
    holder.rule = Workshop  # a class is of type `type`; an object of it would count
    assert cache.outside_sources(holder) == {}


def test_every_fact_is_part_of_the_key() -> None:
    others = [{**FACTS, "kind": "other"}, {**FACTS, "shape": [2, 1]}, {**FACTS, "more": 0}, {"kind": "test"}]
    assert len({cache.key(facts) for facts in (FACTS, *others)}) == 5


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise BackendError("no")

    for _ in range(2):
        with pytest.raises(BackendError, match="no"):
            cache.ensure(tmp_path, FACTS, fails)
        assert cache.find(tmp_path, FACTS) is None
        assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    cache.ensure(tmp_path, FACTS, made)


def test_a_killed_build_leaves_nothing_under_the_key_and_no_lock(tmp_path: Path) -> None:
    process = started(KILLED, str(tmp_path))
    process.communicate(timeout=240)
    assert process.returncode == 9
    assert any(path.name == "half" for path in tmp_path.rglob("*")), "it was killed before it built anything"
    assert cache.find(tmp_path, FACTS) is None
    assert not (tmp_path / cache.key(FACTS)).exists()
    folder = cache.ensure(tmp_path, FACTS, made)  # hangs if the lock is still held
    assert sorted(path.name for path in folder.iterdir()) == [cache.MANIFEST, "thing"]


def test_a_folder_without_a_manifest_is_built_again(tmp_path: Path) -> None:
    folder = tmp_path / cache.key(FACTS)
    folder.mkdir()
    (folder / "half").write_text("x")
    assert cache.find(tmp_path, FACTS) is None
    cache.ensure(tmp_path, FACTS, made)
    assert not (folder / "half").exists()


def test_two_processes_build_once(tmp_path: Path) -> None:
    rivals = [started(RIVAL, str(tmp_path), name) for name in "12"]
    said = [process.communicate(timeout=240)[0].strip() for process in rivals]
    assert [process.returncode for process in rivals] == [0, 0]
    builder = (tmp_path / "builds").read_text()
    assert builder in ("1", "2")
    assert said == [builder, builder]


def test_a_copy_is_an_artefact(tmp_path: Path) -> None:
    """A copy may replace an artefact, or be the artefact itself: `load(folder)`, then `save(folder)`."""
    folder = cache.ensure(tmp_path / "here", FACTS, made)
    for there in (tmp_path / "far" / "there", tmp_path / "far" / "there", tmp_path / "here"):
        cache.copy(folder, there)
        found = cache.find(there, FACTS)
        assert found is not None and (found / "thing").read_text() == "whole"


def test_a_broken_copy_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, there = cache.ensure(tmp_path / "here", FACTS, made), tmp_path / "there"

    def breaks(source: Path, to: Path, **_named: object) -> None:
        shutil.copy(source / cache.MANIFEST, to)  # the first of its files, as it may be
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(cache.shutil, "copytree", breaks)
        with pytest.raises(ArtefactError, match="disk full"):
            cache.copy(folder, there)
    assert not list(there.iterdir())
    (there / folder.name).mkdir()  # a folder without its manifest
    cache.copy(folder, there)
    assert cache.find(there, FACTS) is not None and (there / folder.name / "thing").is_file()


def test_a_graph_that_did_not_compile_is_not_saved(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, saved = fresh(workshop.checkpoint()), []
    compiled = decoder.backend.compile

    def fails(graph: Graph, announce: Callable[[str], None]) -> Step:
        raise BackendError("no compiler today")

    def ask(kind: str) -> None:
        decoder.graph(GraphKey(kind), lambda _body, _bucket: torch.nn.Identity(), [torch.zeros(1)])

    monkeypatch.setattr(decoder.backend, "compile", fails)
    with pytest.raises(BackendError, match="no compiler today"):
        ask("bad")
    with pytest.raises(ArtefactError, match="save: expected compiled graphs, got none; call compile"):
        decoder.save("graphs")
    monkeypatch.setattr(decoder.backend, "compile", compiled)
    monkeypatch.setattr(decoder.backend, "save", lambda graphs, _folder: saved.extend(g.key for g in graphs))
    ask("good")
    decoder.save("graphs")
    assert saved == [GraphKey("good")]
