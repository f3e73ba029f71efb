"""Drafters in a target's process: the keys of a models file that ask for them, and the memory that they take.

The keys are those of `paceline.config.SpeculativeConfig`, with its grammar for `draft`. Not here: draft models with
cores of their own (`draft_of`), and how drafters are loaded (`paceline.auto_drafter`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.config import SpeculativeConfig
from paceline.core.errors import CheckpointError, ConfigurationError, PlanError
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights.folder import is_gguf
from paceline.placement.planning.footprint import NUMBER_BYTES, Footprint, Shape, cache_bytes, footprint

KEYS = ("draft", "k", "acceptor", "exact", "fused", "confidence_threshold", "vocabulary", "prefix_caching")
"""Keys of a target in a models file; they mean what they mean in Python."""

_STORED_BYTES = 2  # of a number in a file of heads, which says nothing of the format it is loaded in
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


@dataclass(frozen=True, slots=True)
class InProcessDraft:
    """A draft model or heads that a target loads beside itself.

    name        as it was asked for
    config      of a draft model; None for heads
    file_bytes  size of the weight files, from which heads are estimated
    degree      tensor-parallel degree; None = the target's
    """

    name: str
    config: ModelConfig | None
    file_bytes: int
    degree: int | None = None

    def footprint(self, target: ModelConfig, shape: Shape, target_degree: int) -> Footprint:
        """Bytes on each of the target's cores, besides the target's own.

        Heads count as one more layer of the target with a cache of its own, and as whole on every core, which Medusa's
        and small EAGLE heads are: a large EAGLE head is divided and takes less. Scratch and programs are the target's.
        """
        if self.config is None:
            weights = self.file_bytes * NUMBER_BYTES[shape.amp] // _STORED_BYTES
            return Footprint(weights, cache_bytes(replace(target, num_layers=1), shape, target_degree), 0)
        degree = target_degree if self.degree is None else self.degree
        positions = min(shape.n_positions, self.config.max_position_embeddings)
        own = footprint(self.config, replace(shape, quantization=None, n_positions=positions), degree)
        return Footprint(own.weights, own.cache, 0)


def read_speculative(keys: Mapping[str, object], where: str, resolve: Callable[[str], Path]) -> SpeculativeConfig:
    """The keys of a target that say who drafts in its process. ``resolve``: from a path as written to a
    folder or a GGUF file.

    Raises:
        PlanError: a value is wrong, or names a folder that is not there.
    """
    try:
        config = SpeculativeConfig(**keys)
    except ConfigurationError as error:
        raise PlanError(f"{where}: {error}") from error

    def located(path: str) -> str:
        folder = resolve(path)
        if not folder.is_dir() and not is_gguf(folder):
            raise PlanError(
                f"{where}: draft {path!r} is neither a drafter's name nor a folder; correct it, or give {{path: DIR}}"
            )
        return str(folder)

    return config.with_paths(located)


def adapted(config: SpeculativeConfig, drafts: Sequence[InProcessDraft]) -> SpeculativeConfig:
    """With ``k="auto"`` where nothing says a length: under load, the longest that pays is a short one, or none.

    Heads keep the length of their tree, or the usual one. ``drafts``: those of the configuration that have weights.
    """
    leaves = config.leaves()
    lengths = [spec.k for spec in (*config.draft, *leaves) if spec.k is not None]
    heads = any(draft.config is None for draft in drafts)
    if config.k is not None or lengths or heads or not leaves or any(leaf.name == "none" for leaf in leaves):
        return config
    return config.model_copy(update={"k": "auto"})


def in_process_drafts(config: SpeculativeConfig, where: str) -> tuple[InProcessDraft, ...]:
    """The drafters of a target that have weights, with what is known of them without loading any.

    Raises:
        PlanError: a folder holds neither a model nor heads.
    """
    drafts = []
    for spec in config.leaves():
        if spec.path is None:
            continue
        folder, degree = Path(spec.path), dict(spec.options).get("tp_degree")
        size = sum(file.stat().st_size for pattern in _WEIGHTS for file in folder.glob(pattern))
        try:
            model: ModelConfig | None = ModelConfig.from_pretrained(folder)
        except CheckpointError as error:
            if not size:
                raise PlanError(f"{where}: draft {spec.path!r} holds neither a model nor heads ({error})") from error
            model = None
        drafts.append(InProcessDraft(str(spec), model, size, degree if isinstance(degree, int) else None))
    return tuple(drafts)
