"""Files that cannot be written: a named error, nothing half written, and the existing files stay."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.core.errors import ConfigurationError, StorageError
from paceline.decoder import environment
from paceline.decoder.compile import cache
from paceline.decoder.weights.atomic_write import atomic_write, save_pickle, save_tensors
from paceline.decoder.weights.files import write_weight_file
from paceline.heads.trainer import RunState
from tests.full_disk import full_disk

LARGE = {"weight": torch.zeros(50_000)}


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.safetensors", save_tensors),
        ("a.pt", save_pickle),
        ("b.safetensors", write_weight_file),
        ("b.pt", write_weight_file),
    ],
)
def test_a_full_disk_is_reported_and_no_partial_file_stays(
    tmp_path: Path, name: str, write: Callable[[Path, dict[str, torch.Tensor]], None]
) -> None:
    path = tmp_path / "new" / name
    small = {"weight": torch.ones(2)}
    write(path, small)
    with full_disk(), pytest.raises(StorageError, match=f"{name}: cannot be written .*; make room"):
        write(path, LARGE)
    assert [file.name for file in path.parent.iterdir()] == [name]
    kept = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert kept["weight"].tolist() == [1.0, 1.0]


def test_a_run_that_cannot_be_saved_can_still_be_resumed(tmp_path: Path) -> None:
    state: dict[str, object] = {"step": 1}
    run = RunState(tmp_path / "state.pt", {"data": "a"}, lambda: state)
    with run.saving():
        pass
    with full_disk(), pytest.raises(StorageError, match=r"state.pt: cannot be written"), run.saving():
        state = {"step": 2, **LARGE}
    assert run.restore() == {"step": 1}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_a_write_ends_the_process_after_it(tmp_path: Path, number: int) -> None:
    def end(*_: object) -> None:
        raise SystemExit(7)

    before = signal.signal(number, end)
    try:
        state: dict[str, object] = {"step": 1}
        run = RunState(tmp_path / "state.pt", {}, lambda: state)
        with pytest.raises(SystemExit, match="7"), run.saving():
            with run.changing():
                os.kill(os.getpid(), number)
                state["step"] = 2
            state["step"] = 3
        assert run.restore() == {"step": 2} and signal.getsignal(number) is end
    finally:
        signal.signal(number, before)


def test_the_error_names_the_path_and_the_systems_reason(tmp_path: Path) -> None:
    path = tmp_path / "no folder" / "log.jsonl"
    said = r"log.jsonl: cannot be written \(No such file or directory\); make room"
    with pytest.raises(StorageError, match=said), atomic_write(path), path.open("a"):
        pass


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path: Path) -> None:
    root = tmp_path / "file" / "cache"
    root.parent.write_text("no folder")
    with pytest.raises(StorageError, match=r"cache: cannot be written \(Not a directory\); .*PACELINE_CACHE"):
        cache.ensure(root, {"kind": "test"}, lambda _folder: None)


def test_a_user_without_a_home_gets_an_error_that_names_the_cache_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    with pytest.raises(ConfigurationError, match="PACELINE_CACHE: expected a folder for the cache, got none"):
        environment.cache_root()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert environment.cache_root() == tmp_path / ".cache" / "paceline"
    monkeypatch.setenv("PACELINE_CACHE", "~/graphs")  # as a Dockerfile or a unit file leaves it
    assert environment.cache_root() == tmp_path / "graphs"


def test_other_errors_are_not_reported_as_disk_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="g\\+\\+"), atomic_write(tmp_path):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "g++")
