"""Steps that need a decoder alone: reading a prompt, and the logits of a window."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.decoder.decoder import Body, CompiledDecoder
from paceline.decoder.kernels import Place


class PrefillStep(nn.Module):
    """Read a chunk of a prompt into one slot."""

    def __init__(self, body: Body, reach: int) -> None:
        super().__init__()
        self.body, self._reach = body, reach

    def forward(self, tokens: Tensor, row: Tensor, count: Tensor, slot: Tensor) -> tuple[Tensor]:
        """tokens [1, chunk] int32; row, count, slot [1] int32 -> logits [1, 1, V] of the last real token."""
        hidden = self.body(tokens, Place(row, count, slot, self._reach, padded=True))
        last = (count - 1).to(torch.int64).view(1, 1, 1).expand(1, 1, hidden.shape[-1])
        return (self.body.logits(hidden.gather(1, last)),)


class WindowStep(nn.Module):
    """Logits of a window in every slot."""

    def __init__(self, body: Body, reach: int) -> None:
        super().__init__()
        self.body, self._reach = body, reach

    def forward(self, tokens: Tensor, row: Tensor) -> tuple[Tensor]:
        """tokens [B, T] int32, row [B] int32 -> logits [B, T, V] float32."""
        return (self.body.logits(self.body.window(tokens, row, self._reach)),)


def prefill(decoder: CompiledDecoder, slot: int, prompt: Sequence[int]) -> Tensor:
    """Read a whole prompt into a slot, in chunks. -> logits [1, 1, V] after its last token."""
    done, logits = 0, None
    while done < len(prompt):
        left = len(prompt) - done
        chunk = next((c for c in decoder.options.chunks if c >= left), decoder.options.chunks[-1])
        part = list(prompt[done : done + chunk])
        tokens = torch.tensor([part + [0] * (chunk - len(part))], dtype=torch.int32)
        numbers = [torch.tensor([n], dtype=torch.int32) for n in (done, len(part), slot)]
        step = decoder.graph(f"prefill[{chunk}]", PrefillStep, (tokens, *numbers), reach=decoder.reach(done + chunk))
        (logits,) = step(tokens, *numbers)
        done += len(part)
    assert logits is not None, "an empty prompt is refused before this"
    return logits


def window(decoder: CompiledDecoder, tokens: Tensor, row: Tensor, *, reach: int) -> Tensor:
    """Logits of a window. tokens [B, T] int32, row [B] int32 -> [B, T, V] float32."""
    step = decoder.graph(f"window[{tokens.shape[1]}]", WindowStep, (tokens, row), reach=reach)
    return step(tokens, row)[0]
