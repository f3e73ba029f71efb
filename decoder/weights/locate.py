"""From what a user gives as a model to what is read: a Hugging Face folder, or a GGUF file. Nothing is opened here.

A model of the Hugging Face hub that was not fetched yet is fetched (`paceline.decoder.weights.hub`).
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.core.errors import CheckpointError
from paceline.decoder.weights.folder import has_weight_files, is_gguf
from paceline.decoder.weights.hub import HubId, snapshot
from paceline.decoder.weights.known_models import KNOWN_MODELS, need_fetched


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """The folder or the GGUF file that ``path`` means.

    path  a folder; a GGUF file; a folder with one GGUF file and no other weights; or the name of a known model, unless
          there is a folder or file of that name; or the id of a model on the Hugging Face hub, ``owner/name`` or
          ``owner/name@revision``, where no file or folder is called so

    What is not there is given back as it is, for its reader to refuse.

    Raises:
        MissingWeightsError: it is the name of a known model that was not fetched.
        CheckpointError: the folder holds several GGUF files and nothing else to read; or it is no path.
        DownloadError, FetchError, StorageError: the model cannot be fetched from the hub, see `hub.snapshot`.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError(f"{path!r} is no path; give the local folder of a Hugging Face checkpoint.")
    place = Path(path)
    if os.fspath(path) in KNOWN_MODELS and not place.exists():
        return need_fetched(os.fspath(path))
    if not place.exists() and (hub_id := HubId.parse(os.fspath(path))) is not None:
        return snapshot(hub_id)
    if not place.is_dir() or has_weight_files(place):
        return place
    try:
        files = sorted(file for file in place.iterdir() if is_gguf(file))
    except OSError as error:
        raise CheckpointError(f"{place} cannot be read ({error}); check its permissions.") from error
    if len(files) > 1:
        raise CheckpointError(
            f"{place} holds {len(files)} GGUF files and no safetensors; give one of them: "
            f"{', '.join(file.name for file in files[:4])}{', ...' if len(files) > 4 else ''}"
        )
    return files[0] if files else place
