"""The NKI Library's attention over prompts, ``attention_cte``, as each of the two ways into PyTorch calls it.

Arguments are those of its page (nki/library/api/attention-cte, 2026-06-11) and of NxD Inference's call with a prefix
(`perform_prefix_prefill`, release 2.29): heads are its batch, key-value heads are not repeated, queries are scaled
before. It has run on a stand-in that computes what the page says, never on a chip. Not here: which prompts it is used
for (`paceline.neuron.prompt_attention`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import BackendError
from paceline.neuron.prompt_attention import KERNEL

_MODULE = f"nkilib.core.attention.{KERNEL}"
_SCALE = 1.0  # must be, where there are prior rows

Call = Callable[..., Tensor]
"""As `paceline.neuron.prompt_attention.operator`."""


def through_xla(cores: int) -> Call:
    """Called with tensors of torch_xla while a graph is traced. ``cores``: physical ones of a logical core.

    Raises:
        BackendError: at the first call, if the NKI Library cannot be imported.
    """

    def attend(chunk: list[Tensor], prior: list[Tensor], window: int) -> Tensor:
        kernel = _on_grid(_imported("nki").jit(_kernel()), cores)
        return _launch(kernel, chunk, prior, window=window)

    return attend


@lru_cache(maxsize=1)
def native(cores: int) -> Call:
    """Two custom operators of TorchNeuron, one for chunks with rows before them and one without; called inside of
    `torch.compile` ("How to work with NKI kernels from torch-neuronx", SDK 2.33, 2026-10-15).

    Raises:
        BackendError: the NKI Library or TorchNeuron's `nki_op` cannot be imported.
    """
    torch_neuronx, kernel = _imported("torch_neuronx"), _kernel()
    try:
        launched, nki_op = _on_grid(torch_neuronx.wrap_nki(kernel), cores), torch_neuronx.nki_op
    except AttributeError as error:
        raise _missing(error) from error
    after_rows = nki_op("paceline::prompt_attention", mutates_args={})(_behind(launched))
    at_start = nki_op("paceline::prompt_attention_at_start", mutates_args={})(_first(launched))

    def attend(chunk: list[Tensor], prior: list[Tensor], window: int) -> Tensor:
        mixed: Tensor = after_rows(*chunk, *prior, window) if prior else at_start(*chunk, window)
        return mixed

    return attend


def _behind(kernel: Any) -> Call:
    """The operator for a chunk with rows before it. Its types are named in full: its schema is read from them."""

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


def _first(kernel: Any) -> Call:
    """The same for a chunk without."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
        return _launch(kernel, [q, k, v], [], window=window)

    return forward


def _launch(kernel: Any, chunk: list[Tensor], prior: list[Tensor], *, window: int) -> Tensor:
    """Tensors as `paceline.neuron.prompt_attention.attend` has them, laid as the kernel's flags say."""
    flags = {"causal_mask": True, "sliding_window": window, "tp_q": True, "tp_k": True, "tp_out": False}
    before = dict(zip(("k_prior", "v_prior", "prior_used_len"), prior, strict=True)) if prior else {}
    mixed: Tensor = kernel(*chunk, _SCALE, **flags, **before)
    return mixed


def _on_grid(kernel: Any, cores: int) -> Any:
    """A kernel over the physical cores of a logical one."""
    return kernel if cores == 1 else kernel[cores]


def _kernel() -> Any:
    return getattr(_imported(_MODULE), KERNEL)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _missing(error) from error


def _missing(error: Exception) -> BackendError:
    return BackendError(
        f"the NKI Library's attention over prompts cannot be used ({error}); install nki and nkilib of the SDK's own "
        "release, or set PACELINE_NEURON_PROMPTS=plain"
    )
