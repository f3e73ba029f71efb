"""Attention over a prompt's chunk as one operator, with a kernel in the NKI Library, ``attention_cte``.

Such a kernel keeps the scores of a chunk in the core's own memory, while the plain form writes them out and reads them
again, and it reads the rows before the chunk without waiting for the chunk's own rows. `refusal` lists the chunks that
it does not support; windows of rounds are too short for it.

Its two PyTorch interfaces have separate calls. Arguments follow its page (nki/library/api/attention-cte, 2026-06-11)
and of NxD Inference's call with a prefix (`perform_prefix_prefill`, release 2.29): heads are its batch, key-value heads
are not repeated, queries are already scaled. It has run on a fake that follows the page, never on a chip.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.core import reduce
from paceline.core.errors import BackendError
from paceline.decoder.kernels.protocol import AttentionRule
from paceline.decoder.parallel.vocab_part import graph_operator

NAME = "prompt_attention"  # the operator's
KERNEL = "attention_cte"  # of the NKI Library (aws-neuron/nki-library, nkilib.core.attention)

MAX_WIDTH, MAX_HEADS, MAX_ROWS = 128, 512, 131_072
"""Largest head width, query heads and rows that it supports: its source of 2026-04-13 (`_MAX_HEAD_DIM`, `_MAX_BS`,
`_MAX_SEQLEN`); the first is on its page too (nki/library/api/attention-cte, 2026-06-11).
"""

LONG, STEPS, ALONE = 1024, (256, 512), 4096
"""Chunk sizes for which it pays: with two physical cores in a logical one, multiples of 256, and of 512 from 1,024 on;
with one, 4,096 rows at least (NxD Inference's `get_flash_attention_strategy`, release 2.29).
"""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prompt chunk that a graph computes in one call.

    rows    number of rows of the chunk
    before  cache rows before it that the graph reads
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
    """Selection of chunks for the library's attention kernel, and the last decision.

    missing  why the kernel is unavailable; "" if it is available
    cores    physical cores per logical core, over which it shards heads
    chosen   decision for the last traced chunk, for messages; "" before the first
    """

    def __init__(self, missing: str = "", *, cores: int = 1) -> None:
        self.missing, self.cores, self.chosen = missing, cores, ""
        self._told: set[str] = set()

    def takes(self, chunk: Chunk, rule: AttentionRule) -> bool:
        """Return whether the kernel computes a chunk."""
        why = self.missing or refusal(chunk, rule, cores=self.cores)
        self.chosen = f"plain attention over prompts: {why}" if why else f"attention over prompts by {KERNEL}"
        return not why

    def news(self) -> str:
        """Return the last decision once; "" if it was already returned."""
        new = "" if self.chosen in self._told else self.chosen
        self._told.add(self.chosen)
        return new


def refusal(chunk: Chunk, rule: AttentionRule, *, cores: int) -> str:
    """Return why the kernel does not support a chunk, or does not pay; "" if it is used."""
    long = chunk.rows >= ALONE if cores == 1 else chunk.rows % STEPS[chunk.rows >= LONG] == 0
    for fails, why in (
        (rule.cap > 0, "the kernel has no soft cap of scores"),
        (rule.slopes is not None, "no ALiBi is given to the kernel"),
        (rule.sinks is not None, "no sinks are given to the kernel"),
        (rule.chunk > 0, "the kernel has no chunks"),
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


@lru_cache(maxsize=1)
def operator() -> Any:
    """Return the operator ``paceline_graph::prompt_attention``: attention from every row to the first ``used`` prior
    rows, and to the rows of the chunk up to its own.

    chunk   query [H, T, D], already scaled, and the chunk's keys and values, [G, T, D] each, all of one type
    prior   keys and values before them, [G, R, D] each of that type, and used [1] int32; empty if there are none
    window  see `AttentionRule.window`
    -> [H, T, D] of that type. Query head h reads key-value head h // (H / G).
    """
    return graph_operator(NAME, "(Tensor[] chunk, Tensor[] prior, int window) -> Tensor", plain=plain, shapes=_shape)


def plain(chunk: list[Tensor], prior: list[Tensor], window: int) -> Tensor:
    """Compute the operator in PyTorch, in float32."""
    q, keys, values = chunk
    before, rows, share = 0, q.shape[1], q.shape[0] // keys.shape[0]
    column = torch.arange(rows, dtype=torch.int32, device=q.device)
    # Sequence position of a column, counted from the chunk's first row, and whether it is filled.
    place, filled = column, torch.ones_like(column, dtype=torch.bool)
    if prior:
        before, keys, values = prior[0].shape[1], torch.cat((prior[0], keys), 1), torch.cat((prior[1], values), 1)
        earlier = torch.arange(before, dtype=torch.int32, device=q.device) - prior[2]
        place, filled = torch.cat((earlier, place)), torch.cat((earlier < 0, filled))
    distance = column.unsqueeze(1) - place
    seen = filled & (distance >= 0) & ((distance < window) if window else filled)
    keys, values = (x.float().repeat_interleave(share, 0) for x in (keys, values))
    scores = torch.where(seen, q.float() @ keys.transpose(1, 2), reduce.NEGATIVE)
    return (torch.softmax(scores, -1) @ values).to(q.dtype)


def _shape(chunk: list[Tensor], _prior: list[Tensor], _window: int) -> Tensor:
    return chunk[0].new_empty(chunk[0].shape)


Attention = Callable[[list[Tensor], list[Tensor], int], Tensor]
"""Type of `operator`."""

_SCALE = 1.0  # required with prior rows


def through_xla(cores: int) -> Attention:
    """Return the call for tensors of torch_xla while a graph is traced. ``cores``: physical cores per logical core.

    Raises:
        BackendError: at the first call, if the NKI Library cannot be imported.
    """

    def attend(chunk: list[Tensor], prior: list[Tensor], window: int) -> Tensor:
        kernel = _imported("nki").jit(_kernel())
        return _launch(kernel if cores == 1 else kernel[cores], chunk, prior, window=window)

    return attend


@lru_cache(maxsize=1)
def native(cores: int) -> Attention:
    """Return the call of two TorchNeuron custom operators, one for chunks with prior rows and one without; for use
    inside `torch.compile` ("How to work with NKI kernels from torch-neuronx", SDK 2.33, 2026-10-15).

    Raises:
        BackendError: the NKI Library or TorchNeuron's `nki_op` cannot be imported.
    """
    torch_neuronx, kernel = _imported("torch_neuronx"), _kernel()
    try:
        wrapped, nki_op = torch_neuronx.wrap_nki(kernel), torch_neuronx.nki_op
    except AttributeError as error:
        raise _missing(error) from error
    launched = wrapped if cores == 1 else wrapped[(cores,)]  # it iterates over its grid (torch_neuronx/nki_hop.py)
    after_rows = nki_op("paceline::prompt_attention", mutates_args={})(_behind(launched))
    at_start = nki_op("paceline::prompt_attention_at_start", mutates_args={})(_first(launched))

    def attend(chunk: list[Tensor], prior: list[Tensor], window: int) -> Tensor:
        mixed: Tensor = after_rows(*chunk, *prior, window) if prior else at_start(*chunk, window)
        return mixed

    return attend


def _behind(kernel: Any) -> Callable[..., Tensor]:
    """Wrap the kernel for a chunk with prior rows. Types are named in full: its schema is read from them."""

    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_prior: torch.Tensor,
        v_prior: torch.Tensor,
        used: torch.Tensor,
        window: int,
    ) -> torch.Tensor:
        return _launch(kernel, [q, k, v], [k_prior, v_prior, used], window=window)

    return forward


def _first(kernel: Any) -> Callable[..., Tensor]:
    """Wrap the kernel for a prompt's first chunk (no prior rows)."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
        return _launch(kernel, [q, k, v], [], window=window)

    return forward


def _launch(kernel: Any, chunk: list[Tensor], prior: list[Tensor], *, window: int) -> Tensor:
    """Run the kernel on `operator`'s tensors, arranged as the kernel's flags specify."""
    flags = {"causal_mask": True, "sliding_window": window, "tp_q": True, "tp_k": True, "tp_out": False}
    before = dict(zip(("k_prior", "v_prior", "prior_used_len"), prior, strict=True)) if prior else {}
    mixed: Tensor = kernel(*chunk, _SCALE, **flags, **before)
    return mixed


def _kernel() -> Any:
    return getattr(_imported(f"nkilib.core.attention.{KERNEL}"), KERNEL)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _missing(error) from error


def _missing(error: Exception) -> BackendError:
    return BackendError(
        f"the NKI Library's prompt attention cannot be used ({error}); install nki and nkilib from the same SDK "
        "release, or set PACELINE_NEURON_PROMPTS=plain"
    )
