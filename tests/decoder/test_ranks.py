"""A model divided over processes gives the tokens of the whole one, in every mode; and its processes end.

Sums of partial products are rounded otherwise: logits differ by some 1e-5, so that tokens are equal but at a near-tie.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.errors import CheckpointError, ConfigurationError, RankError
from paceline.decoder import steps
from paceline.decoder.backends.base import Graph
from paceline.decoder.backends.eager import RankedBackend
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.parallel.ranks import Ranks
from tests.decoder import tiny
from tests.decoder.families import save_pair
from tests.decoder.headed import medusa
from tests.decoder.tiny import CHUNK, Workshop

DEGREES = [3, 4]
"""Four heads on three ranks leave one that is filled up with zeros; two K/V heads on four ranks are there twice."""
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 2, [5, 5]]
SETTINGS: dict[str, dict[str, object]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 3, "temperature": 1.2},
    "cut": {"do_sample": True, "seed": 5, "temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
}
Source = SamplingDecoder | SpeculativeGenerator


opened = partial(tiny.load, batch_size=2, context_length_estimate=[CHUNK])


def load(
    workshop: Workshop, degree: int, role: str = "target", kind: str = "grouped", **more: object
) -> SamplingDecoder:
    return opened(workshop.checkpoint(role, kind), tp_degree=degree, **more)


@pytest.fixture(scope="module", params=[3, pytest.param(4, marks=pytest.mark.full)])
def target(request: pytest.FixtureRequest, workshop: Workshop) -> Iterator[SamplingDecoder]:
    """Keep the processes of this degree alive for all tests of this module."""
    made = load(workshop, request.param)
    yield made
    made.close()


def tokens(source: Source, **asked: object) -> list[list[int]]:
    found: list[list[int]] = source.sample(PROMPTS, max_new_tokens=8, **asked).tolist()  # type: ignore[arg-type]
    return found


def ranks(decoder: SamplingDecoder) -> Ranks:
    assert isinstance(decoder.backend, RankedBackend)
    return decoder.backend.ranks


def test_plain_fused_and_separate_models_on_ranks_keep_the_tokens(workshop: Workshop, target: SamplingDecoder) -> None:
    degree = target.options.layout.degree
    draft, whole = load(workshop, degree, "draft"), load(workshop, 1)
    assert ranks(draft) is ranks(target), "a graph can hold both"
    fused, apart = (SpeculativeGenerator(draft, target, k=3, fused=fused) for fused in (True, False))
    for setting, generator in (("greedy", fused), ("sampled", fused), ("cut", apart)):
        wanted = tokens(whole, **SETTINGS[setting])
        assert tokens(target, **SETTINGS[setting]) == wanted
        assert tokens(generator, **SETTINGS[setting]) == wanted
        assert generator.statistics.tau > 1.5


@pytest.mark.full
def test_nine_heads_on_six_ranks_are_zero_padded(workshop: Workshop) -> None:
    """9 query and 3 K/V heads, 50 columns of the MLP and 97 ids become 12, 6, 54 and 102."""
    target, draft = (load(workshop, 6, role, "odd") for role in ("target", "draft"))
    try:
        assert target.body.shard.heads == 2 and len(target.body.model.ids) == 17
        whole = load(workshop, 1, kind="odd")
        drafted = SpeculativeGenerator(draft, target, k=3)
        for setting, generator in (("greedy", drafted), ("sampled", drafted), ("cut", target)):
            assert tokens(generator, **SETTINGS[setting]) == tokens(whole, **SETTINGS[setting])
    finally:
        draft.close()
        target.close()


def test_logits_equal_those_of_one_rank(workshop: Workshop, target: SamplingDecoder) -> None:
    ours, theirs = (steps.prefill(made, 0, PROMPTS[0])[0] for made in (target, load(workshop, 1)))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    assert not torch.equal(ours, theirs), "these are sums of parts"


def test_reject_gathers_the_distribution_over_the_vocabulary(workshop: Workshop, target: SamplingDecoder) -> None:
    made = []
    for degree, model in ((1, load(workshop, 1)), (target.options.layout.degree, target)):
        generator = SpeculativeGenerator(load(workshop, degree, "draft"), model, k=2, acceptor="reject")
        made.append(tokens(generator, **SETTINGS["sampled"]))
    assert made[0] == made[1]


@pytest.mark.parametrize(("tied", "setting"), [(True, "cut"), (False, "greedy")])
def test_medusa_on_ranks_keeps_the_tokens(
    workshop: Workshop, target: SamplingDecoder, tmp_path: Path, tied: bool, setting: str
) -> None:
    drafted = []
    for model in (load(workshop, 1), target):
        generator = medusa(model, tmp_path, tied=tied, fused=None if tied else False)
        assert tokens(generator, **SETTINGS[setting]) == tokens(model, **SETTINGS[setting])
        drafted.append(generator.statistics.num_accepted_tokens_per_pos)
    assert drafted[0] == drafted[1], "the same is drafted on every degree"


@pytest.mark.parametrize(
    ("kind", "gqa"),
    [("biased", "all-gather-heads"), ("llama 3", "replicated-heads"), ("one key head", "all-gather-heads"),
     ("one key head", "replicated-heads")],
)  # fmt: skip
def test_every_head_layout_on_ranks_keeps_the_tokens(
    workshop: Workshop, target: SamplingDecoder, kind: str, gqa: str
) -> None:
    """The tiny kinds have 2 K/V heads, or 1; "biased" and "llama 3" have biases, and tied tables."""
    degree = target.options.layout.degree
    if gqa == "all-gather-heads" and degree == 3 and kind != "biased":  # 16 rows of keys for three
        with pytest.raises(ConfigurationError, match="K/V heads that 3 ranks can share evenly"):
            load(workshop, degree, kind=kind, group_query_attention=gqa)
        return
    divided = load(workshop, degree, kind=kind, group_query_attention=gqa)
    assert divided.body.caches[0][0].shape[1] == max(1, divided.config.num_kv_heads // degree)
    assert tokens(divided, **SETTINGS["sampled"]) == tokens(load(workshop, 1, kind=kind), **SETTINGS["sampled"])


@pytest.mark.parametrize("family", ["mixtral", "gemma2"])
def test_other_families_on_ranks_keep_the_tokens(target: SamplingDecoder, tmp_path: Path, family: str) -> None:
    """Experts with 40 columns, and capped scores in heads of 12, for three ranks and for four."""
    degree = target.options.layout.degree
    folders = save_pair(tmp_path, family)
    whole, (divided, draft) = opened(folders[0]), (opened(one, tp_degree=degree) for one in folders)
    wanted = tokens(whole, **SETTINGS["sampled"])
    assert tokens(divided, **SETTINGS["sampled"]) == wanted
    assert tokens(SpeculativeGenerator(draft, divided, k=3), **SETTINGS["sampled"]) == wanted


class Scale(torch.nn.Module):
    """A step with a separate tensor, and a tool that may not be sent."""

    def __init__(self, tool: object) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(3.0), requires_grad=False)
        self.same = self.scale
        self.tool = tool

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * self.scale * self.same,)


def test_tensors_of_a_failed_step_are_sent_with_the_next(target: SamplingDecoder) -> None:
    """The tensors of a step that failed on its way do not count as known to the other ranks."""
    step, example = Scale(lambda: None), [torch.ones(2)]

    def ask() -> list[torch.Tensor]:
        return list(target.graph(GraphKey("scale"), lambda _body, _bucket: step, example)(*example))

    with pytest.raises(ConfigurationError, match="cannot be sent to the other ranks"):
        ask()
    step.tool = None
    assert ask()[0].tolist() == [9.0, 9.0]
    assert tokens(target) == tokens(target), "the other ranks are still there"


def test_models_of_different_degrees_take_two_steps(workshop: Workshop, target: SamplingDecoder) -> None:
    draft = load(workshop, 1, "draft")
    generator = SpeculativeGenerator(draft, target, k=2)
    assert tokens(generator) == tokens(target)
    assert generator.statistics.tau > 1.5
    with pytest.raises(ConfigurationError, match=r"expected the same (value|tp_degree) for draft and target"):
        tokens(SpeculativeGenerator(draft, target, k=2, fused=True))


def test_two_targets_cannot_share_a_tensor_parallel_draft(target: SamplingDecoder) -> None:
    with pytest.raises(ConfigurationError, match="target: a model with tp_degree above 1 has one cache; load"):
        target.sibling()


def gone(processes: list[int]) -> bool:
    return not any(Path(f"/proc/{process}").exists() for process in processes)


@pytest.fixture
def alone(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> SamplingDecoder:
    monkeypatch.setattr("paceline.decoder.backends.eager.shared", Ranks)
    return load(workshop, 2)


def test_processes_end_with_the_last_decoder_that_is_closed_or_dropped(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = Ranks(2)
    assert not list(tmp_path.iterdir())  # a kill would leave it
    monkeypatch.setattr("paceline.decoder.backends.eager.shared", lambda *_: own)
    first, second = load(workshop, 2), load(workshop, 2, "draft")
    processes = own.processes
    tokens(first)
    first.close()
    first.close()
    with pytest.raises(RankError, match="it was closed"):
        tokens(first)
    assert own.alive and not gone(processes)
    tokens(second)
    del second
    gc.collect()
    assert gone(processes)


def test_a_killed_rank_is_named_and_takes_the_others_with_it(alone: SamplingDecoder) -> None:
    processes = ranks(alone).processes
    events = alone.stream(PROMPTS, max_new_tokens=40)
    next(events)
    os.kill(processes[0], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 ended with status -9"):
        list(events)
    assert gone(processes)
    with pytest.raises(RankError, match="load it again"):
        tokens(alone)


def test_a_rank_that_fails_says_why(alone: SamplingDecoder) -> None:
    """Rank 1 gets an input of another shape, so that it fails where rank 0 waits for it."""
    own = ranks(alone)
    step = Sum(alone)
    made = own.make(own._bodies[alone.body], Graph(GraphKey("sum"), step, (), {}))
    own._send("run", made, [torch.ones(2), torch.ones(3)])
    with pytest.raises(RankError, match="rank 1 failed: RuntimeError: The size of tensor"):
        own.run(made, step, [torch.ones(2), torch.ones(2)])
    assert not ranks(alone).alive


class Sum(torch.nn.Module):
    """Adds its inputs, then over the ranks."""

    def __init__(self, decoder: SamplingDecoder) -> None:
        super().__init__()
        self._group = decoder.body.group

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        return (self._group.reduce(x + y),)


def test_a_rank_that_fails_to_load_raises_in_the_caller(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(workshop.checkpoint(), tmp_path / "model")
    own, adopt = Ranks(2), Ranks.adopt
    monkeypatch.setattr("paceline.decoder.backends.eager.shared", lambda *_: own)

    def late(*given: object, **named: object) -> int:
        """The files are gone by the time the others look."""
        shutil.rmtree(folder)
        return adopt(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Ranks, "adopt", late)
    with pytest.raises(CheckpointError, match="expected a folder"):
        tiny.load(folder, tp_degree=2)
    assert gone(own.processes)


@pytest.mark.usefixtures("two_ranks")
def test_a_load_that_fails_on_a_rank_leaves_the_others_their_models(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number is released on ranks that never had it."""
    path = workshop.checkpoint()
    with monkeypatch.context() as patch:
        patch.setattr("paceline.decoder.parallel.ranks.Path", lambda _: tmp_path / "absent")
        with pytest.raises(CheckpointError, match="absent"):
            load(workshop, 2)
    again = tiny.load(path, tp_degree=2)
    assert again.sample([[3, 1, 4]], max_new_tokens=3).shape == (1, 6)


@pytest.mark.usefixtures("two_ranks")
def test_a_relative_path_is_resolved_by_the_loading_process(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes of the ranks are older than the change of its folder."""
    shutil.copytree(workshop.checkpoint(), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    decoder = tiny.load(Path("model"), tp_degree=2)
    assert decoder.sample([[3, 1, 4]], max_new_tokens=3).shape == (1, 6)
