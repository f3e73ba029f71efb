"""Draft with the target's own first layers, its last norm and its output layer (LayerSkip, arXiv 2404.16710).

Nothing is loaded: weights and cache are the target's. Verification has written the rows of all committed tokens but the
last, so a round reads that one alone. Drafts write rows in the first layers that the next verification writes again.
Worth it for checkpoints that were trained to exit early (facebook/layerskip-*).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from paceline.core.types import DraftKey, SamplingTensors
from paceline.decoder.decoder import CompiledDecoder, ModelWithCache
from paceline.decoder.kernels.protocol import CachePosition
from paceline.draft.heads import AutoregressiveHead, HeadDrafter, at_index
from paceline.draft.options import first_layers, layerskip_shape
from paceline.heads.options import Wanted


class EarlyExitHead(AutoregressiveHead):
    """The first ``layers`` layers of the target. It shares the target's cache."""

    def __init__(self, body: ModelWithCache, layers: int) -> None:
        super().__init__(body.kernels, body.options)
        self.body, self.layers = body, layers

    def real_rows(self, sampling: SamplingTensors, window: int) -> Tensor | None:
        return self.body.real_rows(sampling, window)

    def read(self, tokens: Tensor, features: Tensor | None, place: CachePosition, *, last: Tensor) -> Tensor:
        row = (place.row + last).clamp(max=self.options.n_positions - 1)
        return self._exit(at_index(tokens, last), replace(place, row=row, count=place.count.clamp(max=1)))

    def next(self, token: Tensor, hidden: Tensor, place: CachePosition) -> Tensor:
        return self._exit(token, place)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.body.logits(hidden)

    def sample_tokens(self, hidden: Tensor, positions: Tensor, sampling: SamplingTensors) -> Tensor:
        return self.body.sample_tokens(hidden, positions, sampling)

    def _exit(self, tokens: Tensor, place: CachePosition) -> Tensor:
        hidden: Tensor = self.body.model(tokens, place, self.body.caches[: self.layers])[0]
        return hidden


class LayerSkipDrafter(HeadDrafter):
    """Drafts chains of ``k`` tokens with the first ``layers`` layers of ``target``; None: a quarter of them.

    draft_tree  or static trees: "tree:PARENTS" with the parent of each node, -1 for the root
    """

    misfit_causes = "a target that was not trained to exit early; too few `layers`, or too many to be faster"

    def __init__(
        self, k: int, target: CompiledDecoder, *, layers: int | None = None, draft_tree: str = "chain"
    ) -> None:
        shape = layerskip_shape(target.config, Wanted(k), layers=layers, draft_tree=draft_tree)
        self.layers = first_layers(target.config) if layers is None else layers
        super().__init__(EarlyExitHead(target.body, self.layers), target, shape)

    @property
    def state(self) -> nn.Module:
        return self.decoder.body

    def bucket(self, rows: int) -> int:
        return self.decoder.bucket_for(rows + self.draft_shape.depth)

    def step_key(self, bucket: int) -> DraftKey:
        return DraftKey("layerskip", self.draft_shape, bucket, variant=f"{self.layers} layers")

    def cache_key(self) -> dict[str, object]:
        return {"layerskip": self.layers}
