"""Decoding without a draft, several tokens in one graph, so that the host's part of a round is paid once for all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from paceline.core.protocols import Reading
from paceline.core.types import PAD, Commit, PrefillResult, RoundLimits, SamplingKind, SamplingTensors
from paceline.decoder.decoder import CompiledDecoder, ModelWithCache, first_slots, for_all_slots, idle_tokens
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.steps import move_slot, prefill_in_chunks
from paceline.target.steps import root_of


class AutoregressiveStep(nn.Module):
    """``steps`` target passes over one token each, unrolled; ``width`` is that of a commit, and no less.

    ``kind``: of sampling, of the rounds it is for.
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
        """The fields of a Commit; limit [B] int32, tokens besides the first; params [B, 4], seeds [B, 4]
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


class AutoregressiveDecoder:
    """Runs `AutoregressiveStep`. Like a verifier to which nothing is ever proposed, but for how much it commits.

    ``width``: tokens a commit has room for, where it takes turns with verifiers.
    """

    movable = True

    def __init__(self, decoder: CompiledDecoder, steps: int, *, width: int | None = None) -> None:
        self.decoder, self.steps, self._width = decoder, steps, steps if width is None else width

    def prefill(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        """Read a prompt and pick the first token."""
        logits, _ = yield from prefill_in_chunks(self.decoder, slot, prompt, shared=True)
        position = torch.tensor([[len(prompt)]], dtype=torch.int32)
        return PrefillResult(int(self.decoder.body.kernels.sample_tokens(logits, position, sampling)))

    def finish_request(self, slot: int) -> None:
        """The next request's prompt overwrites the cache rows."""
        self.decoder.read_prompts.finish(slot)

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """See `paceline.core.protocols.MovesRequests`."""
        move_slot(self.decoder, slot, to, rows=rows)

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Commit:
        """Up to ``limits.max_accept + 1`` tokens in every slot."""
        inputs = [commit.tokens, commit.count, commit.first_row, limits.max_accept, sampling.params, sampling.seeds]
        kind = self.decoder.sampling_kind(sampling.kind)
        make = partial(AutoregressiveStep, steps=self.steps, width=self._width, kind=kind)
        bucket, lines = self.decoder.bucket_for(limits.max_rows), self.decoder.lines_for(limits.used_slots)
        key = GraphKey(
            "autoregressive",
            self.steps,
            bucket,
            commit_width=commit.tokens.shape[1],
            next_width=self._width,
            sampling=kind,
            lines=lines,
        )
        inputs = [first_slots(x, lines) for x in inputs]
        tokens, count = self.decoder.graph(key, make, inputs)(*inputs)
        slots = len(commit.count)
        tokens = for_all_slots(tokens, slots, idle_tokens(self._width))
        return Commit(tokens, for_all_slots(count, slots, 1), commit.first_row + commit.count)
