"""Recorded steps: they give what the step itself gives, share its tensors, and compute nothing twice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from paceline import SpeculativeGenerator
from paceline.core.errors import ArtefactError, BackendError
from paceline.decoder.native.program import Program
from tests.decoder.tiny import Workshop, fresh
from tests.equality.settings import PROMPTS, plain, run


class Step(nn.Module):
    """A step of a function of buffers and inputs. ``weight`` is a parameter, ``state`` a buffer."""

    state: Tensor

    def __init__(self, body: Callable[..., tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.arange(12.0).view(3, 4), requires_grad=False)
        self.register_buffer("state", torch.zeros(3, 4))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.body(self, *inputs)


def recorded(body: Callable[..., tuple[Tensor, ...]], *example: Tensor) -> tuple[Step, Program]:
    step = Step(body)
    return step, Program(step, example)


def operators(program: Program) -> list[str]:
    return [call.op._schema.name.removeprefix("aten::") for call in program.calls]


X = torch.tensor([[1.0, -2.0, 0.5, 3.0]])


@pytest.mark.parametrize(
    "body",
    [
        lambda s, x: (x * 2, x - 1, x / 3, 1 - x),
        lambda s, x: (torch.where(x > 0, x, -1), (x > 0.5) & (x < 5), x.to(torch.int32) + 1),
        lambda s, x: tuple(x.split(2, dim=-1)),
        lambda s, x: (torch.cat([x, s.weight]), torch.stack([x, x + 1])),
        lambda s, x: (s.weight[x.to(torch.int64).clamp(0, 2)[:, :1], 1:3], nn.functional.pad(x, (1, 2), value=-1)),
        lambda s, x: (x.cumsum(-1), x.sum(-1), x.amax(-1), x.mean(-1, keepdim=True), x.softmax(-1)),
        lambda s, x: (torch.arange(4, dtype=torch.float32) + x, torch.full_like(x, 3), x.new_zeros(2)),
        lambda s, x: (x.expand(3, 4).t(), x[..., None].transpose(1, 2), x.view(2, 2)),
        lambda s, x: (nn.functional.gelu(x, approximate="tanh"), nn.functional.linear(x, s.weight)),
        lambda s, x: (x.double() * 0.1, (x > 0).float() + 0, x.bfloat16() - 0),
    ],
)
def test_a_recorded_program_equals_the_step(body: Callable[..., tuple[Tensor, ...]]) -> None:
    step, program = recorded(body, torch.zeros(1, 4))
    for x in (X, X * 7, X[:, [2, 0, 1, 3]], X.expand(4, 4)[1:2]):
        for got, wanted in zip(program(x), step(x), strict=True):
            assert got.dtype == wanted.dtype and torch.equal(got, wanted)
            assert got.is_contiguous()


def test_a_program_shares_the_tensors_of_the_step() -> None:
    """Nothing is copied, and what a caller changes in place counts."""
    step, program = recorded(lambda s, x: (x + s.weight, x + s.state), X)
    step.state.fill_(5)
    assert torch.equal(program(X)[1], X + step.state)
    assert torch.equal(program(X)[0], X + step.weight)


def test_weight_only_expressions_are_computed_once() -> None:
    _, program = recorded(lambda s, x: (x + (s.weight * 2).sum(0) + torch.arange(4).detach() - 0,), X)
    assert operators(program) == ["add", "add"]
    _, program = recorded(lambda s, x: ((x * 3).exp() + (x * 3).exp(),), X)
    assert operators(program) == ["mul", "exp", "add"]
    _, program = recorded(lambda s, x: (x + s.state.sum(),), X)
    assert operators(program) == ["sum", "add"], "a buffer may change"
    _, program = recorded(lambda s, x: (x.exp(), x.log())[:1], X)
    assert operators(program) == ["exp"], "nobody reads the logarithm"


def test_results_may_be_modified_by_the_caller() -> None:
    step, program = recorded(lambda s, x: (x, x[:, :2], s.weight[0], torch.ones(3), (y := x + 1), y), X)
    given = X.clone()
    wanted = [one.clone() for one in step(given)]
    for _ in range(2):
        outputs = program(given)
        assert all(torch.equal(*pair) for pair in zip(outputs, wanted, strict=True))
        for one in outputs:
            one.fill_(-9)
    assert torch.equal(given, X) and step.weight[0, 1] == 1


def test_a_program_dropped_during_a_trace_is_not_recorded() -> None:
    """Garbage may be dropped at any moment."""
    _, program = recorded(lambda _step, x: (x + 1,), torch.ones(3))

    def traced(x: Tensor) -> Tensor:
        program.close()
        return x * 2

    nodes = make_fx(traced, tracing_mode="fake")(torch.ones(3)).graph.nodes
    assert [node.op for node in nodes] == ["placeholder", "call_function", "output"]
    with pytest.raises(RuntimeError, match="closed"):
        program(torch.ones(3))


def test_a_step_that_depends_on_tensor_values_is_rejected() -> None:
    with pytest.raises(BackendError, match="a step that reads a tensor's values cannot be recorded"):
        recorded(lambda s, x: (x + 1,) if bool(x.sum() > 0) else (x,), X)


def test_inputs_of_another_shape_are_rejected() -> None:
    _, program = recorded(lambda s, x: (x + 1,), X)
    with pytest.raises(RuntimeError, match="input 0 of a step has the shape"):
        program(torch.zeros(2, 4))
    with pytest.raises(RuntimeError, match="a step of 1 inputs was given 2"):
        program(X, X)


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda x: (x / 50).exp(),
    "view": lambda x: x.view(-1).view_as(x),
    "slice": lambda x: torch.cat([x[:, 2:], x[:, :2]], -1),
    "detach": lambda x: x.detach(),
    "nothing": lambda x: x + 0,
    "clamp": lambda x: x.clamp(-3, 3),
    "write": lambda x: x.mul_(0.5),
    "write a part": lambda x: x[:, 1:3].add_(1).new_zeros(x.shape) + x,
    "constant": lambda x: torch.full_like(x, 2) + torch.arange(4.0),
}


@hypothesis.given(st.lists(st.tuples(st.sampled_from(sorted(UNARY)), st.integers(0, 7), st.integers(0, 7)), max_size=9))
@hypothesis.example([("write", 1, 1), ("constant", 0, 0), ("nothing", 4, 0), ("write", 4, 1), ("write a part", 4, 3)])
@hypothesis.settings(max_examples=60)
def test_random_orders_of_reads_and_writes_equal_the_step(operations: list[tuple[str, int, int]]) -> None:
    """Removing and moving operations changes no result, with some in place, on inputs, views and state."""

    def body(step: Step, x: Tensor) -> tuple[Tensor, ...]:
        values = [x + 1, step.state[:1], step.weight[:1] * 1.5]
        for name, first, second in operations:
            made = UNARY[name](values[first % len(values)])
            values.append(made + values[second % len(values)] if second % 2 else made)
        return tuple(value + 0.0 for value in values)

    step, program = recorded(body, X)
    expected = Step(body)
    for _ in range(2):
        for got, wanted in zip(program(X), expected(X), strict=True):
            assert torch.equal(got, wanted)
    assert torch.equal(step.state, expected.state)


def test_steps_of_a_decoder_share_its_weights_and_cache(workshop: Workshop) -> None:
    draft, target = (fresh(workshop.checkpoint(role), backend="native", batch_size=4) for role in ("draft", "target"))
    for fused in (None, False):
        run(SpeculativeGenerator(draft, target, k=4, fused=fused), {})
    own = {
        tensor.untyped_storage().data_ptr()
        for decoder in (draft, target)
        for tensor in (*decoder.body.parameters(), *decoder.body.buffers())
    }
    held = [one for decoder in (draft, target) for step in decoder._steps.values() for one in step.constants]  # type: ignore[attr-defined]
    assert all(one.numel() < 2000 or one.untyped_storage().data_ptr() in own for one in held)
    assert own & {one.untyped_storage().data_ptr() for one in held}


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_native_has_no_graphs_to_save(workshop: Workshop, tmp_path: Path, backend: str) -> None:
    decoder = workshop.decoder(backend=backend)
    plain(decoder, {}, prompts=PROMPTS[:1], new=1)
    for act in (decoder.save, decoder.load):
        with pytest.raises(ArtefactError, match=rf"{backend}.*use neuron"):
            act(tmp_path)


@pytest.mark.parametrize("how", ["CXX", "PATH"])
def test_a_missing_compiler_names_the_remedy(tmp_path: Path, how: str) -> None:
    """If kernels have to be built: with them in the cache no compiler is needed."""
    place = {"CXX": "/nonexistent/g++"} if how == "CXX" else {"PATH": str(tmp_path)}
    variables = {**{name: value for name, value in os.environ.items() if name != "CXX"}, **place}
    command = [sys.executable, "-c", "from paceline.decoder.backends.native import NativeBackend; NativeBackend()"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**variables, "PACELINE_CACHE": str(tmp_path)}, check=False
    )
    assert re.search(r"g\+\+.*on PATH, got neither; install g\+\+.*apt install.*set CXX.*backend='eager'", done.stderr)


@pytest.mark.parametrize("draft", ["model", "ngram", None])
def test_compile_records_every_sampling_mode(workshop: Workshop, draft: str | None) -> None:
    """A request of a kind that was not seen before makes no other wait."""
    small, target = (fresh(workshop.checkpoint(role), backend="native", batch_size=4) for role in ("draft", "target"))
    generator = SpeculativeGenerator(small if draft == "model" else draft, target, **({"k": 4} if draft else {}))
    generator.compile()
    made = [dict(decoder._steps) for decoder in (small, target)]
    sampled = {"do_sample": True, "top_k": 5}
    for wishes in ({"logprobs": 1}, {"repetition_penalty": 1.2}, sampled, {"logit_bias": {3: -5.0}}):
        run(generator, wishes)
    later = [str(key) for decoder, before in zip((small, target), made, strict=True)
             for key, _ in decoder._steps.keys() - before.keys()]  # fmt: skip
    assert later == []
