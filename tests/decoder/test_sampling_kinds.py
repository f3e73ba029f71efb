"""Sampling modes in graphs: the graph that a round uses, and what its kernels receive.

The kernels here check each of their calls; they choose what plain PyTorch chooses, so that no token may change.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from paceline import SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core import noise
from paceline.core.acceptance.base import TargetView
from paceline.core.acceptance.rejection import Reject
from paceline.core.errors import ConfigurationError
from paceline.core.sampling import SAMPLING_KINDS, Sampling, kind_of_params, sampling_tensors
from paceline.core.types import Proposal, SamplingKind, SamplingTensors
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.parallel.vocab_part import VocabPart
from paceline.eagle.tree import DynamicTree
from paceline.neuron import graph_sampling
from paceline.neuron.kernels import TraceableKernels
from paceline.neuron.step_work import step_work
from tests.decoder.steps import SAMPLED, STEPS, inputs
from tests.decoder.tiny import Workshop, fresh
from tests.eagle.heads import drafter
from tests.equality.settings import SETTINGS, plain, run, texts

KINDS: dict[SamplingKind, dict[str, object]] = {
    "greedy": SETTINGS["greedy"],
    "top-k": SETTINGS["hot and cut"],
    "full": SETTINGS["cool"],
    "wide": {**SETTINGS["cool"], "top_k": 300},
}


class KernelsByKind(TorchKernels):
    """Kernels that rely on the kind: it must be as wide as the values. ``seen``: the kinds of all calls."""

    sampling_kinds = True

    def __init__(self) -> None:
        self.seen: set[SamplingKind] = set()

    def sample_tokens(
        self,
        logits: Tensor,
        positions: Tensor,
        sampling: SamplingTensors,
        *,
        stream: int = noise.TARGET,
        part: VocabPart | None = None,
    ) -> Tensor:
        self._check(sampling)
        if part is not None:
            return graph_sampling.sample_tokens(logits, positions, sampling, part=part, stream=stream)
        return super().sample_tokens(logits, positions, sampling, stream=stream)

    def probabilities(self, logits: Tensor, sampling: SamplingTensors) -> Tensor:
        self._check(sampling)
        return super().probabilities(logits, sampling)

    def _check(self, sampling: SamplingTensors) -> None:
        self.seen.add(sampling.kind)
        least = SAMPLING_KINDS.index(kind_of_params(sampling.params))
        assert SAMPLING_KINDS.index(sampling.kind) >= least, f"{sampling.kind} is too narrow for {sampling.params}"


def by_kind(workshop: Workshop, role: str = "target") -> tuple[SamplingDecoder, KernelsByKind]:
    """A separate decoder whose kernels have a graph for every sampling mode."""
    decoder, kernels = fresh(workshop.checkpoint(role), backend="eager", batch_size=2), KernelsByKind()
    decoder.on_graph = lambda _event: None
    decoder.backend.kernels = decoder.body.kernels = kernels
    return decoder, kernels


def made(*decoders: SamplingDecoder) -> list[GraphKey]:
    return [key for decoder in decoders for key, _ in decoder._steps]


DRAFTS: dict[str, tuple[object, dict[str, object], set[str]]] = {
    "nothing": (None, {"k": 0}, {"verify"}),
    "several plain steps": (None, {"k": 3}, {"autoregressive"}),
    "n-grams": ("ngram", {"k": 3}, {"verify"}),
    "a model": ("draft", {"k": 3, "fused": False}, {"verify", "draft"}),
    "a fused model": ("draft", {"k": 3}, {"verify"}),
    "a fused model that draws": ("draft", {"k": 3, "acceptor": "reject"}, {"verify"}),
    "a fused head": ("head", {}, {"verify"}),
    "a head": ("head", {"fused": False}, {"verify", "draft"}),
}


FEW = ("several plain steps", "a fused model that draws", "a head")
"""What `make test` asks: only graphs of Neuron and XLA differ by kind."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.full) for n in DRAFTS])
def test_every_sampling_mode_has_separate_graphs_and_the_same_tokens(
    workshop: Workshop, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    source, options, graphs = DRAFTS[name]
    target, kernels = by_kind(workshop)
    draft, draft_kernels = by_kind(workshop, "draft")
    if source == "head":
        source = drafter(tmp_path_factory.mktemp("head"), target, 3, DynamicTree(5, depth=2, width=2))
    generator = SpeculativeGenerator(draft if source == "draft" else source, target, **options)  # type: ignore[arg-type]
    for kind, setting in KINDS.items():
        before = set(made(target, draft))
        kernels.seen.clear()
        draft_kernels.seen.clear()
        result = run(generator, setting)
        rounds = [key for key in made(target, draft) if key.is_round or key.kind == "draft"]
        assert {key.sampling for key in rounds if key not in before} == {kind}, "other kinds have no graph for it"
        assert {key.kind for key in rounds} == graphs
        # What `reject` draws after a rejection is drawn without filters: of the whole vocabulary, or of the top-k list.
        unfiltered = "full" if kind == "wide" and "acceptor" in options else kind
        assert kernels.seen | draft_kernels.seen <= {kind, unfiltered}
        if "acceptor" not in options or kind == "greedy":
            assert texts(result) == plain(workshop.decoder(), setting)
    keys = made(target, draft)
    assert all(key.sampling is None for key in keys if not key.is_round and key.kind != "draft")
    fused = {key.sampling for key in keys if key.draft is not None and key.is_round}
    assert fused == (set(KINDS) if "fused" in name else set())


@pytest.mark.parametrize("name", SAMPLED)
def test_a_step_passes_its_sampling_mode_to_the_kernels(workshop: Workshop, name: str) -> None:
    decoder = workshop.decoder()
    body, kernels = deepcopy(decoder.body), KernelsByKind()
    body.kernels = kernels
    step = STEPS[name](body, decoder.n_positions, kind="wide")  # type: ignore[call-arg]
    for module in step.modules():
        if isinstance(getattr(module, "kernels", None), KernelsByKind):
            module.kernels = kernels  # also of a draft model in the same step, which is a copy
    with torch.no_grad():
        step(*inputs(name, 1))
    drawn = {"wide", "full"} if "reject" in name else {"wide"}
    best = name.startswith("draft") and "tree" in name  # the likeliest tokens, whatever the sampling
    assert kernels.seen == (set() if best else drawn)


def test_kernels_that_read_values_have_one_graph_for_all_modes(workshop: Workshop) -> None:
    draft, target = (fresh(workshop.checkpoint(role), batch_size=2) for role in ("draft", "target"))
    generator = SpeculativeGenerator(draft, target, k=3)
    for setting in KINDS.values():
        run(generator, setting)
    assert {key.sampling for key in made(target, draft) if key.is_round} == {"full"}


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize(("kinds", "later"), [(None, "wide"), (["full", "greedy"], "top-k")])
def test_compile_builds_the_graphs_of_the_given_modes_or_all_but_the_widest(
    workshop: Workshop, kinds: list[SamplingKind] | None, later: SamplingKind, fused: bool | None
) -> None:
    (draft, _), (target, _) = by_kind(workshop, "draft"), by_kind(workshop)
    generator = SpeculativeGenerator(draft, target, k=3, fused=fused)
    generator.compile(**({} if kinds is None else {"kinds": kinds}))
    before, wanted = set(made(target, draft)), kinds or ["greedy", "top-k", "full"]
    assert {key.sampling for key in before} == {None, *wanted}
    for kind in wanted:
        assert texts(run(generator, KINDS[kind])) == plain(workshop.decoder(), KINDS[kind])
    assert set(made(target, draft)) == before
    run(generator, KINDS[later])
    assert {key.sampling for key in set(made(target, draft)) - before} == {later}


def test_unknown_sampling_modes_are_rejected(workshop: Workshop) -> None:
    generator = SpeculativeGenerator(None, workshop.decoder())
    for kinds in ([], ["cold"], ["greedy", "Full"]):
        with pytest.raises(ConfigurationError, match="greedy, top-k, full, wide"):
            generator.compile(kinds=kinds)


@pytest.mark.parametrize(
    ("kind", "text"), [(None, "verify[2]@64"), ("full", "verify[2]@64"), ("greedy", "verify[2, greedy]@64")]
)
def test_a_graph_key_names_the_sampling_mode_where_it_matters(kind: SamplingKind | None, text: str) -> None:
    assert str(GraphKey("verify", 2, 64, sampling=kind)) == text


# ---- what `reject` draws after a rejection

K, SLOTS = 4, 64


class Rejecting(nn.Module):
    """The rule, with the kernels of a graph, in rounds of a kind."""

    def __init__(self, kind: SamplingKind) -> None:
        super().__init__()
        self._kind = kind

    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        drafts, draft_probs, distribution, positions, params, seeds = given
        sampling = SamplingTensors(params, seeds, self._kind)
        seen = TargetView(positions, sampling, K, None, distribution, TraceableKernels().sample_tokens)
        accepted = Reject()(Proposal(drafts, None, draft_probs), seen)
        return accepted.path, accepted.count, accepted.token


@pytest.mark.parametrize("greedy", [False, True])
def test_a_residual_of_few_ids_gives_the_same_token_in_every_mode(greedy: bool) -> None:
    """Some rows are greedy, or all; the target has up to 256 ids of 700, as after top-k, and the draft has others."""
    dice = torch.Generator().manual_seed(2)
    rows = [
        Sampling(temperature=0.0 if greedy or slot % 5 == 0 else 1.3, top_k=(1, 7, 256)[slot % 3], seed=slot)
        for slot in range(SLOTS)
    ]
    sampling = sampling_tensors(rows)
    distribution = TorchKernels().probabilities(torch.randn(SLOTS, K + 1, 700, generator=dice) * 2, sampling)
    draft_probs = torch.softmax(torch.randn(SLOTS, K, 700, generator=dice) * 2, -1)
    drafts = torch.multinomial(draft_probs.flatten(0, 1), 1, generator=dice).view(SLOTS, K).to(torch.int32)
    positions = torch.arange(9, 10 + K, dtype=torch.int32).expand(SLOTS, -1)
    given = (drafts, draft_probs, distribution, positions, sampling.params, sampling.seeds)
    kinds: tuple[SamplingKind, ...] = ("greedy", "top-k", "full", "wide") if greedy else ("top-k", "full", "wide")
    path, count, token = Rejecting("wide")(*given)
    assert (count < K).sum() > SLOTS // 2, "most slots draw from a residual"
    for kind in kinds:
        made = Rejecting(kind)(*given)
        assert all(map(torch.equal, made, (path, count, token))), kind


@pytest.mark.full  # a cost of graphs for Neuron
@pytest.mark.parametrize(("kind", "passes", "topk"), [("greedy", 32, 0), ("top-k", 30, 1), ("full", 90, 2)])
def test_the_cost_of_a_residual_is_that_of_its_sampling_mode(kind: SamplingKind, passes: int, topk: int) -> None:
    """In rows of the vocabulary, for a chain of four: the ratio tests and the residual, without the probabilities."""
    width = 128_256
    sampling, ids = sampling_tensors([Sampling()]), [torch.zeros(1, rows, dtype=torch.int32) for rows in (K, K + 1)]
    given = (ids[0], torch.zeros(1, K, width), torch.zeros(1, K + 1, width), ids[1])
    given = (*given, sampling.params, sampling.seeds)
    found = step_work(Rejecting(kind), given, width, tile=128 * 512).rows
    assert found.passes <= passes and found.topk <= topk and found.gathered <= 256, found
