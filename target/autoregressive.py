"""Decoding without a draft, several tokens in one graph, so that the host's time per round is shared by several
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from paceline.core.protocols import HostText
from paceline.core.types import PAD, Commit, Proposal, RoundLimits, SamplingKind, SamplingTensors
from paceline.decoder.backends.base import Step
from paceline.decoder.decoder import CompiledDecoder, ModelWithCache
from paceline.decoder.graph_key import GraphKey
from paceline.target.base import TargetVerifier
from paceline.target.steps import root_of


class AutoregressiveStep(nn.Module):
    """``steps`` target passes over one token each, unrolled; ``width`` is that of a commit, at least ``steps``.

    ``kind``: sampling mode of its rounds.
    """

    def __init__(
        self, body: ModelWithCache, bucket: int, *, steps: int, width: int, kind: SamplingKind = "full"
    ) -> None:
        super().__init__()
        self.body, self._bucket, self._steps, self._unused = body, bucket, steps, width - steps
        self._kind = kind

    def forward(
        self, tokens: Tensor, count: Tensor, start: Tensor, limit: Tensor, params: Tensor, seeds: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The fields of a Commit; limit [B] int32, tokens after the first; params [B, 4], seeds [B, 4]
        -> tokens and count of the next Commit.
        """
        sampling = SamplingTensors(params, seeds, self._kind)
        token, row = root_of(tokens, count, start)
        token = token.clamp(min=0).unsqueeze(1)
        chosen: list[Tensor] = []
        for step in range(self._steps):
            hidden, _ = self.body.window(chosen[-1] if chosen else token, row + step, self._bucket, sampling=sampling)
            position = (row + step + 1).unsqueeze(1)
            chosen.append(self.body.sample_tokens(hidden, position, sampling))
        place = torch.arange(self._steps, dtype=torch.int32, device=tokens.device)
        count = (limit + 1).clamp(max=self._steps)
        kept = torch.where(place < count.unsqueeze(1), torch.cat(chosen, 1), PAD)
        return nn.functional.pad(kept, (0, self._unused), value=PAD) if self._unused else kept, count


class AutoregressiveDecoder(TargetVerifier):
    """Runs `AutoregressiveStep`: a verifier that never receives a proposal.

    ``width``: capacity of a commit in tokens, if it alternates with verifiers.
    """

    def __init__(
        self,
        decoder: CompiledDecoder,
        steps: int,
        *,
        width: int | None = None,
        slots: Sequence[HostText | None] = (),
    ) -> None:
        super().__init__(decoder, steps if width is None else width, slots=slots)
        self.steps = steps

    def __call__(
        self, commit: Commit, proposal: Proposal | None, sampling: SamplingTensors, limits: RoundLimits
    ) -> Commit:
        """Commit up to ``limits.max_accept + 1`` tokens in every slot."""
        inputs = self._inputs(commit, sampling, limits)
        width = commit.tokens.shape[1]

        def find(bucket: int, lines: int, given: Sequence[Tensor]) -> Step:
            kind = self.decoder.sampling_kind(sampling.kind)
            make = partial(AutoregressiveStep, steps=self.steps, width=self._width, kind=kind)
            key = GraphKey(
                "autoregressive",
                self.steps,
                bucket,
                commit_width=width,
                next_width=self._width,
                sampling=kind,
                lines=lines,
            )
            return self.decoder.graph(key, make, given)

        return self._next(commit, inputs, (width, sampling.kind), limits=limits, find=find)
