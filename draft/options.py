"""Options of drafters in modules that load PyTorch, for lists and checks that do not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.core import tree
from paceline.core.errors import ConfigurationError
from paceline.core.types import DraftShape
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.options import LoadOptions, option
from paceline.heads.options import Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions:
    """The option of a head that drafts chains or static trees: ``draft_tree``, as of `parse_draft_tree`."""

    draft_tree: str = "chain"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(LoadOptions):
    """Options of a draft model: those of loading it, and ``draft_tree``, as of `parse_draft_tree`."""

    draft_tree: str = "chain"


def parse_draft_tree(draft_tree: object, *, k: int, drawn: bool = False) -> DraftShape:
    """Parse a draft tree: "chain", of ``k`` tokens, or "tree:PARENTS", with the parent of each node."""
    kind, _, parents = (draft_tree if isinstance(draft_tree, str) else "").partition(":")
    if kind == "chain" and not parents:
        return DraftShape.chain(k)
    try:
        numbers = tuple(int(part) for part in parents.split(","))
    except ValueError:
        numbers = ()
    if kind != "tree" or not numbers:
        raise ConfigurationError(
            f"draft_tree: expected 'chain' or 'tree:PARENTS', e.g. tree:-1,-1,0,0, got {draft_tree!r}; correct it"
        )
    if drawn:
        raise ConfigurationError(
            "draft_tree: expected 'chain' for acceptor='reject', got a tree; use draft_tree='chain', or "
            "acceptor='match', which is exact for trees too"
        )
    return tree.draft_shape(numbers)


def layerskip_shape(
    target: ModelConfig, wanted: Wanted, *, layers: int | None = None, draft_tree: str = "chain"
) -> DraftShape:
    """Check the options of LayerSkip; return the shape of its drafts. ``layers``: how many of the target's layers
    draft, from the first on; None: a quarter of them.
    """
    asked = first_layers(target) if layers is None else layers
    if not 1 <= asked < target.num_layers:
        raise ConfigurationError(
            f"layers: expected 1 to {target.num_layers - 1}, fewer than the target's {target.num_layers}, got "
            f"{asked}; correct it, or use another drafter"
        )
    return parse_draft_tree(draft_tree, k=wanted.k)


def first_layers(target: ModelConfig) -> int:
    return max(1, target.num_layers // 4)


@dataclass(frozen=True, slots=True)
class PardOptions:
    """The decoder to train. The last of its ``num_layers`` is the target's last."""

    start: Path | None = option(
        None, "Folder of a decoder to train, with the target's vocabulary. Default: the target's layers."
    )
    num_layers: int = option(2, "Number of layers of the target to begin with.", names=("--head-layers",))
    mask_token: int | None = option(None, "Id that stands for tokens not yet known. Default: the rarest of the data.")

    def check(self, sizes: ModelConfig) -> None:
        """Raise ConfigurationError if the target does not support such a decoder."""
        if not 1 <= self.num_layers <= sizes.num_layers:
            raise ConfigurationError(
                f"num_layers: expected 1 to {sizes.num_layers}, the target's layers, got {self.num_layers}; correct it"
            )
        if self.mask_token is not None and not 0 <= self.mask_token < sizes.vocab_size:
            raise ConfigurationError(
                f"mask_token: expected an id below {sizes.vocab_size}, got {self.mask_token}; correct it"
            )
        if self.start is not None and (own := ModelConfig.from_pretrained(self.start).vocab_size) != sizes.vocab_size:
            raise ConfigurationError(
                f"start: expected a decoder with the target's vocabulary of {sizes.vocab_size} ids, got {own}; use "
                "another decoder"
            )
