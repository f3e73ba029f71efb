"""Models of the Hugging Face hub: its real client against a hub of the test's own on loopback, and without one."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
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
from paceline.core.errors import DownloadError, FetchError
from paceline.decoder.weights.hub import HubId, checkpoint_path, snapshot
from paceline.fetch import fetch_model
from paceline.placement.planning.model_specs import models_of
from tests.cli.calling import call
from tests.decoder.gguf_files import network
from tests.decoder.gguf_files import write as write_gguf
from tests.decoder.tiny import save_pair

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
    write_gguf(files / "tiny-q4_0.gguf", network(), Kind.Q4_0)
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
