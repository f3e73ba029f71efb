"""Prompts through the NKI Library's attention, on a fake that computes what its page says: who is read by it, with
which layouts, and that nothing else changes.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import SpeculativeGenerator
from paceline.core.errors import BackendError, ConfigurationError
from paceline.decoder import steps
from paceline.decoder.kernels.protocol import PLAIN_ATTENTION, AttentionRule, CachePosition
from paceline.neuron import native as neuron_native
from paceline.neuron import prompt_attention
from paceline.neuron.chips import Chip
from paceline.neuron.kernels import TraceableKernels
from paceline.neuron.native import Runtime
from paceline.neuron.prompt_attention import KERNEL, Chunk, PromptAttention
from paceline.neuron.sdk import Sdk
from paceline.neuron.step_work import step_work
from tests.decoder.steps import STEPS, inputs, traceable
from tests.decoder.tiny import CHUNK, Workshop, fresh
from tests.neuron.conftest import SDK, Install, load
from tests.neuron.native_stand_in import VERSIONS, Recorded

TRN2 = {**SDK, "neuronx-cc": "2.24.5133.0"}  # SDK 2.29
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 5, [5, 5]]
HEADS, GROUPS, WIDTH, ROOM = 6, 2, 8, 48
CHUNK_256 = Chunk(256, 768, 8, 2, 128, torch.bfloat16)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of the tests' length are long enough."""
    monkeypatch.setattr(prompt_attention, "STEPS", (CHUNK, CHUNK))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("bucket", "row"), [(40, 13), (40, 0), (16, 0)])
@pytest.mark.usefixtures("short")
def test_chunk_attention_equals_attention_without_the_kernel(window: int, bucket: int, row: int) -> None:
    """A slot of three, over rows of earlier requests; what is written has the same bits."""
    torch.manual_seed(0)
    shapes = [(1, CHUNK, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    qkv = tuple(torch.randn(shape) for shape in shapes)
    caches = [torch.randn(3, GROUPS, ROOM, WIDTH).to(torch.bfloat16) for _ in range(2)]
    one = lambda x: torch.tensor([x], dtype=torch.int32)  # noqa: E731
    place = CachePosition(one(row), one(CHUNK - 3), one(1), bucket, padded=True)
    made = []
    for prompts in (None, PromptAttention(cores=2)):
        cache = (caches[0].clone(), caches[1].clone())
        kernels = TraceableKernels(prompts)
        made.append((kernels.attend(qkv, cache, place, rule=AttentionRule(window)), *cache))  # type: ignore[arg-type]
    assert prompts is not None and prompts.chosen == f"attention over prompts by {KERNEL}"
    torch.testing.assert_close(made[1][0], made[0][0], rtol=0.02, atol=0.02)
    assert made[1][0].std() > 0.2
    assert torch.equal(made[0][1], made[1][1]) and torch.equal(made[0][2], made[1][2])


@pytest.mark.parametrize(
    ("change", "rule", "cores", "why"),
    [
        ({}, PLAIN_ATTENTION, 2, ""),
        ({"rows": 512}, AttentionRule(window=64), 2, ""),
        ({"rows": 4096}, PLAIN_ATTENTION, 1, ""),
        ({"rows": 256}, PLAIN_ATTENTION, 1, "256 rows is too short"),
        ({"rows": 64}, PLAIN_ATTENTION, 2, "64 rows is too short"),
        ({"rows": 1280}, PLAIN_ATTENTION, 2, "1280 rows is too short or uneven"),
        ({"dtype": torch.float32}, PLAIN_ATTENTION, 2, "the cache is torch.float32"),
        ({"width": 256}, PLAIN_ATTENTION, 2, "the kernel takes 128"),
        ({"before": 1 << 17}, PLAIN_ATTENTION, 2, "more than 131072 rows"),
        ({"heads": 7}, PLAIN_ATTENTION, 2, "7 query heads do not divide over 2"),
        ({}, AttentionRule(cap=50.0), 2, "no soft cap"),
        ({}, AttentionRule(slopes=torch.ones(8)), 2, "no ALiBi"),
    ],
)
def test_an_unsupported_chunk_is_reported(change: dict[str, Any], rule: AttentionRule, cores: int, why: str) -> None:
    prompts = PromptAttention(cores=cores)
    assert prompts.takes(replace(CHUNK_256, **change), rule) == (not why)
    assert why in prompts.chosen and prompts.chosen.startswith(
        "plain attention" if why else "attention over prompts by"
    )


def test_the_table_selects_the_kernel_and_the_user_can_disable_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Sdk(Chip.TRN2, 29, (), 2).prompts().takes(CHUNK_256, PLAIN_ATTENTION)
    for chip, minor in ((Chip.INF2, 28), (Chip.TRN1, 28), (Chip.TRN2, 28)):
        plain = Sdk(chip, minor, (), 2).prompts()
        assert not plain.takes(CHUNK_256, PLAIN_ATTENTION)
        assert plain.chosen.endswith(f"SDK 2.28 has no documented kernel for it on {chip.value}")
    monkeypatch.setenv("PACELINE_NEURON_PROMPTS", "plain")
    for prompts in (Sdk(Chip.TRN2, 29, (), 2).prompts(), neuron_native.prompt_form()):
        assert not prompts.takes(CHUNK_256, PLAIN_ATTENTION) and "PACELINE_NEURON_PROMPTS=plain" in prompts.chosen
    monkeypatch.setenv("PACELINE_NEURON_PROMPTS", "fast")
    with pytest.raises(ConfigurationError, match="PACELINE_NEURON_PROMPTS: expected kernel or plain, got 'fast'"):
        neuron_native.prompt_form()


def _prefill(workshop: Workshop, events: list[str], *, backend: str = "neuron") -> Tensor:
    decoder = fresh(workshop.checkpoint(), backend=backend, amp="bf16", batch_size=2)
    decoder.on_graph = lambda event: events.append(str(event))
    return torch.cat([steps.prefill(decoder, slot, prompt)[0] for slot, prompt in enumerate(PROMPTS)])


@pytest.mark.usefixtures("short")
def test_prefill_uses_the_kernel(workshop: Workshop, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(TRN2, target="trn2")
    events: list[str] = []
    kernel = _prefill(workshop, events)
    calls = importlib.import_module("nkilib.core.attention.attention_cte").attention_cte.calls
    layers, room = 2, 128 - CHUNK
    assert len(calls) == layers, "once in each layer of the one graph"
    assert calls[0]["shapes"] == [(4, CHUNK, 8), (2, CHUNK, 8), (2, CHUNK, 8)] and calls[0]["grid"] == 2
    assert calls[0]["k_prior"].shape == calls[0]["v_prior"].shape == (2, room, 8)
    assert any(f"attention over prompts by {KERNEL}" in event for event in events)
    monkeypatch.setenv("PACELINE_NEURON_PROMPTS", "plain")
    told: list[str] = []
    plain = _prefill(workshop, told)
    assert len(calls) == layers
    assert any("plain attention over prompts: PACELINE_NEURON_PROMPTS=plain" in event for event in told)
    torch.testing.assert_close(kernel, plain, rtol=0.05, atol=0.1)
    assert not torch.equal(kernel, plain)


@pytest.mark.usefixtures("short")
def test_a_fused_round_keeps_the_tokens_with_the_kernel(workshop: Workshop, install: Install) -> None:
    install(TRN2, target="trn2")
    draft, target = (load(workshop, role, amp="bf16") for role in ("draft", "target"))
    wanted = target.sample(PROMPTS, max_new_tokens=8)
    assert torch.equal(SpeculativeGenerator(draft, target, k=2).sample(PROMPTS, max_new_tokens=8), wanted)


def test_the_fake_kernel_rejects_undocumented_inputs(install: Install) -> None:
    install(TRN2, target="trn2")
    call = prompt_attention.through_xla(2)
    q, k = torch.zeros(4, 16, 8).bfloat16(), torch.zeros(2, 16, 8).bfloat16()
    prior, used = torch.zeros(2, 32, 8).bfloat16(), torch.zeros(1, dtype=torch.int32)
    assert call([q, k, k], [prior, prior, used], 0).shape == (4, 16, 8)
    for chunk, before in (
        ([q, k.transpose(1, 2), k], [prior, prior, used]),
        ([q, k, k], [prior.transpose(1, 2), prior, used]),
        ([q.float(), k, k], [prior, prior, used]),
        ([q, k, k], [prior, prior, used.repeat(2)]),
        ([q[:3], k, k], [prior, prior, used]),
    ):
        with pytest.raises(AssertionError, match="attention_cte"):
            call(chunk, before, 0)


def test_a_missing_library_names_the_remedy(install: Install) -> None:
    install(TRN2, target="trn2", code=False)
    q = torch.zeros(4, 16, 8).bfloat16()
    with pytest.raises(
        BackendError, match=r"No module named 'nki'.*install nki and nkilib .*PACELINE_NEURON_PROMPTS=plain"
    ):
        prompt_attention.through_xla(2)([q, q, q], [], 0)


class Wrapped:
    """Result of `wrap_nki`: its grid is iterated over (`NKIHOPCaller` of torch_neuronx/nki_hop.py, 2026-04-21)."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        (cores,) = tuple(map(int, grid))
        return self._kernel[cores]

    def __call__(self, *tensors: Any, **flags: Any) -> Any:
        return self._kernel(*tensors, **flags)


def _torch_neuronx() -> ModuleType:
    """TorchNeuron's two ways to a kernel, of which PyTorch's custom operators are the base."""

    def nki_op(name: str, mutates_args: Any) -> Any:
        def register(function: Any) -> Any:
            made = torch.library.custom_op(name, function, mutates_args=tuple(mutates_args))
            made.register_fake(lambda q, *_rest: torch.empty_like(q))
            return made

        return register

    module: Any = ModuleType("torch_neuronx")
    module.nki_op, module.wrap_nki = nki_op, Wrapped
    module.RUNTIME = SimpleNamespace(close=lambda: None)  # what the other stand-in ends with
    return module


@pytest.mark.usefixtures("short")
def test_torchneuron_calls_the_kernel(workshop: Workshop, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install({}, target="")
    recorded = Recorded()
    home = Runtime(torch.device("cpu"), recorded.compiler, VERSIONS)
    monkeypatch.setattr(neuron_native, "runtime", lambda: home)
    monkeypatch.setitem(sys.modules, "torch_neuronx", _torch_neuronx())
    prompt_attention.native.cache_clear()
    torch._dynamo.reset()
    events: list[str] = []
    kernel = _prefill(workshop, events, backend="neuron-native")
    nodes = [str(node.target) for node in recorded.calls()]
    assert nodes.count("paceline.prompt_attention.default") == 2 and len(recorded.graphs) == 1
    assert any(f"attention over prompts by {KERNEL}" in event for event in events)
    calls = importlib.import_module("nkilib.core.attention.attention_cte").attention_cte.calls
    assert {call["grid"] for call in calls} == {2} and calls[0]["tp_k"] is True
    monkeypatch.setenv("PACELINE_NEURON_PROMPTS", "plain")
    torch.testing.assert_close(kernel, _prefill(workshop, events, backend="neuron-native"), rtol=0.05, atol=0.1)
    prompt_attention.native.cache_clear()
    torch._dynamo.reset()


@pytest.mark.usefixtures("short")
def test_the_prefill_cost_counts_no_scores_in_memory(workshop: Workshop) -> None:
    decoder, given = workshop.decoder(backend="eager", amp="bf16"), inputs("prefill", 1)
    found = []
    for prompts in (None, PromptAttention(cores=2)):
        body = traceable(decoder, kernels=TraceableKernels(prompts))
        found.append(step_work(STEPS["prefill"](body, 128), given, 1 << 20, tile=128 * 512))
    plain, kernel = found
    rows = given[0].shape[1]
    scores = 2 * 4 * rows * 128  # of two layers with four heads: the chunk's rows over those of the bucket
    assert kernel.products == plain.products and kernel.products["bfloat16"] > 4 * scores * 8
    assert kernel.vector < plain.vector - 3 * scores
    assert kernel.read == pytest.approx(plain.read, rel=0.5)
