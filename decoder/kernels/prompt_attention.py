"""Attention over a prompt's chunk as one operator, for which a device's library may have a kernel of its own.

Such a kernel keeps the scores of a chunk in the core's own memory, where the plain form writes them out and reads them
again, and it reads the rows before the chunk without waiting for the chunk's own to be written. Which chunks the NKI
Library's takes is in `refusal`. Not here: the calls of the SDK (`paceline.decoder.backends.neuron.attention_kernel`),
and windows of rounds, which are too short for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.core import reduce
from paceline.decoder.kernels.protocol import AttentionRule

NAME = "prompt_attention"
"""The operator's bare name."""

KERNEL = "attention_cte"
"""Of the NKI Library (aws-neuron/nki-library, ``nkilib.core.attention.attention_cte``)."""

MAX_WIDTH, MAX_HEADS, MAX_ROWS = 128, 512, 131_072
"""Head width, query heads and rows that it takes: its source of 2026-04-13 (`_MAX_HEAD_DIM`, `_MAX_BS`, `_MAX_SEQLEN`);
the first is on its page too (nki/library/api/attention-cte, 2026-06-11)."""

LONG, STEPS, ALONE = 1024, (256, 512), 4096
"""Chunks that it is worth: with two physical cores in a logical one, multiples of 256, and of 512 from 1,024 on; with
one, 4,096 rows at least (NxD Inference's `get_flash_attention_strategy`, release 2.29)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a graph reads at once.

    rows    of the chunk
    before  cache rows before it that the graph looks at
    heads, groups, width  query heads, key-value heads, numbers of a head
    dtype   of the cache
    """

    rows: int
    before: int
    heads: int
    groups: int
    width: int
    dtype: torch.dtype


class PromptAttention:
    """Which chunks are attended to by the library's kernel, and what was chosen.

    missing  why there is none here; nothing where there is one
    cores    physical cores of a logical one, over which it divides heads
    chosen   for the chunk that was traced last, for people; nothing before any was
    """

    def __init__(self, missing: str = "", *, cores: int = 1) -> None:
        self.missing, self.cores, self.chosen = missing, cores, ""
        self._told: set[str] = set()

    def takes(self, chunk: Chunk, rule: AttentionRule) -> bool:
        """Whether a chunk goes to the kernel."""
        why = self.missing or refusal(chunk, rule, cores=self.cores)
        self.chosen = f"plain attention over prompts: {why}" if why else f"attention over prompts by {KERNEL}"
        return not why

    def news(self) -> str:
        """What was chosen last, the first time; nothing if it was told already."""
        new = "" if self.chosen in self._told else self.chosen
        self._told.add(self.chosen)
        return new


def refusal(chunk: Chunk, rule: AttentionRule, *, cores: int) -> str:
    """Why the kernel does not take a chunk, or is not worth it; nothing if it is taken."""
    long = chunk.rows >= ALONE if cores == 1 else chunk.rows % STEPS[chunk.rows >= LONG] == 0
    for fails, why in (
        (rule.cap > 0, "the kernel has no soft cap of scores"),
        (rule.slopes is not None, "no ALiBi is given to the kernel"),
        (chunk.dtype != torch.bfloat16, f"the kernel multiplies in bfloat16, and the cache is {chunk.dtype}"),
        (chunk.width > MAX_WIDTH, f"heads of {chunk.width} numbers, and the kernel takes {MAX_WIDTH}"),
        (chunk.heads > MAX_HEADS, f"{chunk.heads} heads on a core, and the kernel takes {MAX_HEADS}"),
        (chunk.heads % chunk.groups > 0, f"{chunk.heads} query heads do not divide over {chunk.groups}"),
        (chunk.rows + chunk.before > MAX_ROWS, f"more than {MAX_ROWS} rows"),
        (not long, f"a chunk of {chunk.rows} rows is too short or uneven for the kernel to be worth it"),
    ):
        if fails:
            return why
    return ""


def attend(
    query: Tensor, active: tuple[Tensor, Tensor], prior: tuple[Tensor, Tensor] | None, used: Tensor, *, window: int = 0
) -> Tensor:
    """Every row attends to the first ``used`` prior rows, and to the rows of the chunk up to its own.

    query [H, T, D], already scaled; active: keys and values of the chunk, [G, T, D] each; prior: those before it,
    [G, R, D] each, None if there are none; used [1] int32; window: as `AttentionRule.window` -> [H, T, D].
    All of the query's type; query head h reads key-value head h // (H / G).
    """
    k_prior, v_prior = (None, None) if prior is None else prior
    mixed: Tensor = operator()(query, *active, k_prior, v_prior, used, window)
    return mixed


@lru_cache(maxsize=1)
def operator() -> Any:
    """The operator ``paceline_graph::prompt_attention``, defined once per process."""
    library = _library()
    assert library is not None
    return torch.ops.paceline_graph.prompt_attention.default


def plain(
    q: Tensor, k: Tensor, v: Tensor, k_prior: Tensor | None, v_prior: Tensor | None, used: Tensor, window: int
) -> Tensor:
    """The operator in PyTorch, in float32."""
    rows, before, share = q.shape[1], 0, q.shape[0] // k.shape[0]
    if k_prior is not None and v_prior is not None:
        before, k, v = k_prior.shape[1], torch.cat((k_prior, k), 1), torch.cat((v_prior, v), 1)
    keys, values = (x.float().repeat_interleave(share, 0) for x in (k, v))
    column = torch.arange(before + rows, dtype=torch.int32, device=q.device)
    row = torch.arange(rows, dtype=torch.int32, device=q.device).unsqueeze(1)
    # Where a column lies in the text, counted from the chunk's first row: prior rows end there.
    place = torch.where(column < before, column - used, column - before)
    seen = (place <= row) & ((column < used) | (column >= before))
    if window:
        seen = seen & (row - place < window)
    scores = torch.where(seen, q.float() @ keys.transpose(1, 2), reduce.NEGATIVE)
    return (torch.softmax(scores, -1) @ values).to(q.dtype)


@lru_cache(maxsize=1)
def _library() -> torch.library.Library:
    """Kept for the life of the process: the operators go with it."""
    library = torch.library.Library("paceline_graph", "FRAGMENT")
    library.define(
        f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor? k_prior, Tensor? v_prior, Tensor used, int window) -> Tensor"
    )
    library.impl(NAME, plain, "CompositeExplicitAutograd")
    torch.library.register_fake(f"paceline_graph::{NAME}", _shape, lib=library)
    return library


def _shape(q: Tensor, *_rest: object) -> Tensor:
    return q.new_empty(q.shape)
