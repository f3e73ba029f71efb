"""The files weights come in: damaged, absent, hostile or something else; each case has its error."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.core.errors import CheckpointError, MissingWeightsError
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights.checkpoint import load_weights
from tests.decoder.checkpoints import FORMATS, INDEX, State, load, refused

NORM = "model.norm.weight"


def test_links_to_the_hugging_face_cache_are_followed(tmp_path: Path, state: State) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    FORMATS["safetensors shards"](tmp_path, state)
    for number, file in enumerate(path for path in tmp_path.iterdir() if path.is_file()):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..") / "blobs" / str(number))
    assert torch.equal(load(snapshot)[NORM], state[NORM])


@pytest.mark.parametrize("form", ["safetensors", "bin", "legacy bin"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_truncated_files_are_rejected(tmp_path: Path, state: State, form: str, share: float) -> None:
    FORMATS[form](tmp_path, state)
    (file,) = (path for path in tmp_path.iterdir() if path.suffix in (".safetensors", ".bin"))
    os.truncate(file, int(file.stat().st_size * share))
    refused(tmp_path, MissingWeightsError, file.name, "download the file again")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"<html>not found</html>", ["expected a ", "or other file", "download the file again"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ["Git LFS pointer", "git lfs pull"]),
    ],
)
def test_files_of_other_kinds_are_rejected(
    tmp_path: Path, state: State, name: str, content: bytes, parts: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    refused(tmp_path, MissingWeightsError, name, *parts)


def test_a_folder_without_weights_is_rejected(tmp_path: Path, state: State) -> None:
    refused(tmp_path, MissingWeightsError, "model.safetensors, model.safetensors.index.json, pytorch_model.bin")
    config = ModelConfig.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere: expected a folder"):
        load_weights(tmp_path / "nowhere", config, torch.float32)


@pytest.mark.parametrize("form", ["safetensors shards", "bin shards"])
def test_a_missing_shard_is_rejected(tmp_path: Path, state: State, form: str) -> None:
    FORMATS[form](tmp_path, state)
    (shard,) = tmp_path.glob("*-00002-of-*")
    shard.unlink()
    refused(tmp_path, MissingWeightsError, shard.name, "does not exist", "download the checkpoint in full")


def test_a_tensor_in_two_shards_is_rejected(tmp_path: Path, state: State) -> None:
    FORMATS["safetensors shards"](tmp_path, state)
    (shard,) = tmp_path.glob("*-00003-of-*")
    save_file({name: state[name] for name in list(state)[8:]}, shard)
    refused(tmp_path, CheckpointError, list(state)[8], shard.name, "different downloads")


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..\\model.safetensors",
     "c:model.safetensors", "a\0.safetensors", "pytorch_model.bin", "..", ""],
)  # fmt: skip
def test_an_index_may_only_name_files_in_its_folder(tmp_path: Path, state: State, name: str) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "config.json").rename(folder / "config.json")
    for place in (tmp_path, folder / "sub"):  # there to be found, if the name were followed
        save_file(state, place / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(state, name)}))
    refused(folder, CheckpointError, INDEX, repr(name), "its own folder")


@pytest.mark.parametrize(
    ("content", "part"),
    [("{}", "weight_map"), ('{"weight_map": {}}', "weight_map"), ('{"weight_map": ["a"]}', "weight_map"),
     ('{"weight_map', "expected JSON, got")],
)  # fmt: skip
def test_an_index_without_a_weight_map_is_rejected(tmp_path: Path, state: State, content: str, part: str) -> None:
    (tmp_path / INDEX).write_text(content)
    refused(tmp_path, CheckpointError, INDEX, part, "download the file again")


class Attack:
    """Makes the folder ``path`` when it is unpickled without restrictions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("form", ["bin", "legacy bin", "plain pickle", "bin shards"])
def test_code_in_a_pickle_is_rejected_and_not_run(tmp_path: Path, state: State, form: str) -> None:
    trap = tmp_path / "trap"
    poisoned: State = state | {"model.norm.weight": Attack(trap)}  # type: ignore[dict-item]
    if form == "plain pickle":
        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(poisoned[NORM], protocol=2))
    else:
        FORMATS[form](tmp_path, poisoned)
    refused(tmp_path, CheckpointError, ".bin: expected tensors only", "mkdir", "safetensors")
    assert not trap.exists()
    pickle.loads(pickle.dumps(Attack(trap)))
    assert trap.exists(), "the attack itself must work, or this test shows nothing"


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ([torch.ones(2)], ["expected a dictionary of tensors, got a list", "model.state_dict()"]),
        ({"epoch": 3}, ["'epoch': expected a dense tensor with a name, got a int", "model.state_dict()"]),
        ({NORM: torch.ones(24).to_sparse()}, [NORM, "expected a dense tensor with a name, got a"]),
    ],
)
def test_pickles_of_other_objects_are_rejected(tmp_path: Path, state: State, content: object, parts: list[str]) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    refused(tmp_path, CheckpointError, "pytorch_model.bin", *parts)
