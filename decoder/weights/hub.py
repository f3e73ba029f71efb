"""Models of the Hugging Face hub: what an id is, and its files, fetched once into the hub's own cache.

A snapshot that is there in full is used as it is, without a question to the network; `paceline fetch ID` asks for the
newest. Weights, configuration and tokenizer alone are taken: no code, and pickles only where there are no safetensors.
Not here: what a folder holds (`paceline.decoder.weights.files`). The hub's client reads its own environment variables:
HF_HOME and HF_HUB_CACHE (where snapshots lie), HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import CheckpointError, DownloadError, FetchError, StorageError
from paceline.decoder.weights.folder import find_weight_files, has_weight_files

_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_TEXT = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
         "vocab.*", "merges.txt", "chat_template*", "tree.json", "LICENSE*")  # fmt: skip
_SAFE = ("*.safetensors", "*.safetensors.index.json")
_PICKLES = ("pytorch_model*.bin", "pytorch_model*.bin.index.json", "medusa_lm_head.pt", "medusa_heads.pt")
_HEADS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "medusa_heads.pt")
_LEFT_OUT = ("*/*", "consolidated*")  # other formats of the same weights, in folders of their own or by Mistral's name
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES})


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository of the hub, ``owner/name``, and a branch, tag or commit of it; None: its main branch."""

    repo: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubId | None:
        """What ``owner/name`` or ``owner/name@revision`` means; None: it is no id. Nothing is looked up."""
        match = _ID.fullmatch(text)
        if match is None or ".." in text or text.endswith((".gguf", ".json")):
            return None
        return cls(match["repo"], match["revision"])

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def snapshot(name: HubId, *, newest: bool = False) -> Path:
    """The folder of a model, downloaded where it is not there in full yet.

    newest  ask the hub for the newest commit of the branch, also if an older one is there

    Raises:
        DownloadError: the hub cannot be reached, or may not be (HF_HUB_OFFLINE), and the model is not there.
        FetchError: the hub has no such model, or it is not for everyone, or it holds nothing to load.
        StorageError: there is no room for it.
    """
    found = None if newest else _stored(name)
    if found is not None:
        return found
    folder = _download(name, (*_SAFE, *_TEXT))
    if not _has_weights(folder):
        # The same commit: its hash is the folder's name.
        folder = _download(HubId(name.repo, folder.name), (*_PICKLES, *_TEXT))
    if not _has_weights(folder):
        raise FetchError(
            f"{name} holds no weights that can be loaded: neither safetensors nor pytorch_model.bin; of a repository "
            "of GGUF files, download one and give its path."
        )
    return folder


def _stored(name: HubId) -> Path | None:
    """The snapshot in the hub's cache, if it is complete."""
    try:
        folder = _ask_client(name, (*_SAFE, *_TEXT), local=True)
    except Exception:  # not there, or only in part; which error says so differs by the client's version
        return None
    return folder if (folder / "config.json").is_file() and _has_weights(folder) else None


def _has_weights(folder: Path) -> bool:
    """Whether every file of weights is there."""
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
        ignore_patterns=list(_LEFT_OUT),
        local_files_only=local,
    )
    return Path(folder)


def _refusal(name: HubId, error: Exception) -> FetchError | StorageError:
    """Why the client failed."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return FetchError(
            f"{name} is not for everyone: accept its terms on the hub, and log in (`hf auth login`, or set HF_TOKEN)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return FetchError(f"{name.repo} has no revision {name.revision!r}; name a branch, a tag or a commit of it")
    if isinstance(error, errors.RepositoryNotFoundError):
        return FetchError(
            f"{name} is no folder here, and the Hugging Face hub has no model called so that you may read; correct the "
            "name, or log in (`hf auth login`, or set HF_TOKEN)"
        )
    if isinstance(error, errors.HFValidationError):
        return FetchError(f"{name} is no folder here, and no id of the Hugging Face hub either ({error})")
    if isinstance(error, OSError) and error.errno in _FULL:
        return StorageError(f"{name} cannot be stored ({error}); make room, or set HF_HOME to another folder")
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return DownloadError(
            f"{name} is no folder here, and HF_HUB_OFFLINE forbids to fetch it from the Hugging Face hub; "
            f"unset it, or fetch the model on a machine with a network (`paceline fetch {name}`) and give its folder"
        )
    said = str(error).strip().splitlines()
    return DownloadError(
        f"{name} is no folder here, and fetching it from the Hugging Face hub ({constants.ENDPOINT}) failed: "
        f"{type(error).__name__}{': ' + said[0] if said else ''}. Is there a network? Otherwise fetch the model on a "
        f"machine that has one (`paceline fetch {name}`) and give its folder"
    )
