"""PARD: a small decoder that drafts k tokens in one pass, from mask tokens (An et al., arXiv 2504.18583).

Its window is the last commit and k - 1 mask tokens at the positions after it, under the usual causal mask. The row of
the last committed token predicts the first draft, each mask token the one after. The next round overwrites their rows.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.core.errors import CheckpointError, ConfigurationError, UnknownArchitectureError
from paceline.core.types import DraftKey, DraftShape, SamplingKind, SamplingTensors
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.json_fields import Fields
from paceline.decoder.options import MAX_WIDTH
from paceline.draft.drafted_tokens import DraftedTokens, Kept
from paceline.draft.model import ModelDrafter, ModelHead
from paceline.draft.vocab_map import VocabMap


def mask_token(config: Fields) -> int:
    """Return the id of the mask token of a config.json; UnknownArchitectureError: the file asks for more than PARD."""
    kind = config.values.get("spd_type")
    if kind not in (None, "pard") or any(key.startswith("pard2") for key in config.values):
        raise UnknownArchitectureError(
            f"{config.where}: spd_type: expected 'pard', got {kind!r} or keys of PARD-2, which reads the target's "
            "hidden states and is not supported; use a PARD checkpoint"
        )
    if (Path(config.where).parent / "warp_model.bin").is_file():
        raise UnknownArchitectureError(
            f"{config.where}: expected only a decoder, got warp_model.bin, by which PARD-2 reads the target's hidden "
            "states, which is not supported; use a PARD checkpoint"
        )
    token, size = config.integer("pard_token", minimum=0), config.integer("vocab_size")
    if token >= size:
        raise CheckpointError(
            f"{config.where}: pard_token: expected an id below the vocabulary size {size}, got {token}; correct it"
        )
    return token


class PardDrafter(ModelDrafter):
    """Drafts chains of ``k`` tokens with a PARD decoder, or static trees of the best tokens of each position.

    ``mask``: id of its mask token; the rest as for a model. Under a grammar's mask it drafts chains token by token, as
    any model.
    """

    def __init__(
        self,
        decoder: CompiledDecoder,
        k: int | DraftShape,
        *,
        mask: int,
        vocabulary: VocabMap,
        drawn: bool = False,
        confidence_threshold: float = 0.0,
    ) -> None:
        super().__init__(decoder, k, vocabulary=vocabulary, drawn=drawn, confidence_threshold=confidence_threshold)
        depth = self.draft_shape.depth
        if 2 * depth > MAX_WIDTH:
            raise ConfigurationError(
                f"k: expected at most {MAX_WIDTH // 2} for a PARD draft, whose window has 2 k rows, got {depth}; "
                "lower k"
            )
        self.mask = mask

    def step(self, bucket: int, kind: SamplingKind) -> nn.Module:
        shape = self.draft_shape
        kept = self._kept if shape.is_chain else Kept(parents=shape.parents or ())
        return PardStep(self._model, shape.depth, bucket, mask=self.mask, kept=kept, kind=kind)

    def step_key(self, bucket: int) -> DraftKey:
        return DraftKey("pard", self.draft_shape, bucket, self._drawn, f"{self._variant}, mask {self.mask}")


class PardStep(nn.Module):
    """Read a commit and draft ``k`` tokens in one window. ``kind``: sampling mode of its rounds."""

    def __init__(self, head: ModelHead, k: int, bucket: int, *, mask: int, kept: Kept, kind: SamplingKind) -> None:
        super().__init__()
        self.head, self._k, self._bucket, self._mask = head, k, bucket, mask
        self._kept, self._kind = kept, kind
        self.register_buffer("nodes", kept.nodes())

    def forward(
        self, tokens: Tensor, count: Tensor, first_row: Tensor, params: Tensor, seeds: Tensor
    ) -> tuple[Tensor, ...]:
        """The inputs of a `ChainStep` -> outputs of `DraftedTokens`."""
        head, k, sampling = self.head, self._k, SamplingTensors(params, seeds, self._kind)
        rows = torch.arange(tokens.shape[1] + k - 1, dtype=torch.int32, device=tokens.device)
        known = nn.functional.pad(head.vocabulary.known(tokens), (0, k - 1))
        window = torch.where(rows < count.unsqueeze(1), known, self._mask)
        hidden, _ = head.body(window, head.place_real(first_row, count + (k - 1), self._bucket, sampling=sampling))
        ahead = rows[:k]
        from_last = ((count - 1).unsqueeze(1) + ahead).to(torch.int64).unsqueeze(-1)
        hidden = hidden.gather(1, from_last.expand(-1, -1, hidden.shape[-1]))
        positions = (first_row + count).unsqueeze(1) + ahead
        drafts = DraftedTokens(head.kernels, sampling, self._kept, nodes=self.get_buffer("nodes"))
        if self._kept.tokens_only:
            drafts.add(head.sample_tokens(hidden, positions, sampling))
        else:
            drafts.choose(head.logits(hidden).contiguous(), positions)
        return drafts.outputs()
