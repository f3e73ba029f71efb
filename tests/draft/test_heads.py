"""The base of heads: what a head with a cache reads; slots without a request are left out where kernels can."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline import SpeculativeGenerator
from paceline.core.errors import ConfigurationError
from paceline.core.protocols import TraceableDrafter
from paceline.core.sampling import IDLE_ROW, Sampling, sampling_tensors
from paceline.core.types import Commit, FeatureSpec, RoundLimits
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.kernels.protocol import CachePosition
from paceline.draft.heads import AutoregressiveHead, HeadDrafter, ParallelHead, at_index
from paceline.eagle.tree import Chain, DynamicTree, StaticTree
from paceline.medusa.config import MedusaConfig
from paceline.medusa.drafter import MedusaDrafter
from paceline.medusa.network import Heads
from paceline.medusa.tree import Choices
from tests.decoder.tiny import VOCABULARY, Workshop, fresh
from tests.eagle import heads

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [3, 9], list(range(30)), [1, 2, 3]]


class CountingHead(AutoregressiveHead):
    """Its cache holds, for every row, the token it read and, if it reads features, their first number."""

    def __init__(self, target: CompiledDecoder, *, reads: FeatureSpec | None) -> None:
        super().__init__(target.backend.kernels, target.options)
        self.reads = reads
        tokens, features = self.allocate_cache(1, 1)
        self.register_buffer("tokens", tokens.fill_(-1))
        self.register_buffer("features", features)
        table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.register_buffer("table", table)

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.get_buffer("tokens"), self.get_buffer("features"))]

    def read(self, tokens: Tensor, features: Tensor | None, place: CachePosition, *, last: Tensor) -> Tensor:
        rows = place.row.unsqueeze(1) + torch.arange(tokens.shape[1])
        self.get_buffer("tokens")[place.slots.unsqueeze(1), 0, rows, 0] = tokens.to(self.options.dtype)
        if features is not None:
            self.get_buffer("features")[place.slots.unsqueeze(1), 0, rows, 0] = features[..., 0].to(self.options.dtype)
        return at_index(tokens, last).unsqueeze(-1).float()

    def next(self, token: Tensor, hidden: Tensor, place: CachePosition) -> Tensor:
        self.get_buffer("tokens")[place.slots, 0, place.row, 0] = token[:, 0].to(self.options.dtype)
        return token.unsqueeze(-1).float()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.get_buffer("table")[hidden.squeeze(-1).long()]


class OffsetHead(ParallelHead):
    """Logits of position i are those of the target for the next one, turned by i ids."""

    def __init__(self, target: CompiledDecoder) -> None:
        super().__init__(target.backend.kernels, target.options)
        self.output = target.body.shared.head

    def parallel(self, state: Tensor, k: int) -> Tensor:
        logits = self.kernels.linear(state.unsqueeze(1), self.output)
        return torch.cat([logits.roll(index, -1) for index in range(k)], 1)


def rounds(drafter: HeadDrafter, commits: list[Commit], *, asked: set[int]) -> list[list[int]]:
    """Proposals after some of the commits; of the others the drafter is only told."""
    proposals = []
    for number, commit in enumerate(commits):
        drafter.update(commit)
        if number in asked:
            limits = RoundLimits([9], int(commit.first_row + commit.count))
            proposals.append(drafter.propose(commit, sampling_tensors([Sampling()]), limits).tokens[0].tolist())
    return proposals


@pytest.mark.parametrize("reads", [None, FeatureSpec()])
def test_every_committed_token_is_read_at_its_position(workshop: Workshop, reads: FeatureSpec | None) -> None:
    target = workshop.decoder(slots=1)
    text, width = list(range(20, 60)), 3
    features = torch.arange(len(text)).float().view(-1, 1).expand(-1, target.config.hidden_size)
    commits = []
    for first in range(22, 38, 2):
        row = torch.tensor([[*text[first : first + 2], -1]], dtype=torch.int32)
        states = torch.nn.functional.pad(features[first - 1 : first + 1], (0, 0, 0, width - 2)).unsqueeze(0)
        count, start = torch.tensor([2], dtype=torch.int32), torch.tensor([first], dtype=torch.int32)
        commits.append(Commit(row, count, start, states if reads else None))
    caches, proposals = [], []
    for asked in (set(range(8)), {0, 3, 7}, {7}):
        drafter = HeadDrafter(CountingHead(target, reads=reads), target, 2)
        drafter.add_request(0, text[:22], features[:22] if reads else None)
        proposals.append(rounds(drafter, commits, asked=asked)[-1])
        caches.append([cache[0, 0, :, 0].tolist() for cache in drafter.head.caches()[0]])
    shift = 1 if reads else 0
    for tokens, states in caches:
        assert tokens[: 38 - shift] == text[shift:38]
        if reads:
            assert states[:37] == list(range(37)), "the state that predicted a token lies beside it"
    assert proposals[0] == proposals[1] == proposals[2]


@pytest.mark.parametrize(("k", "fused"), [(3, True), (3, False), ((0, 1, 3), None)])
@pytest.mark.parametrize("kind", ["cache", "features", "parallel"])
def test_a_new_head_changes_no_token(
    workshop: Workshop, kind: str, k: int | tuple[int, ...], fused: bool | None
) -> None:
    target, sampling = workshop.decoder(slots=2), {"do_sample": True, "temperature": 0.8, "seed": 3}
    reads = FeatureSpec((0, 1)) if kind == "features" else None
    head = OffsetHead(target) if kind == "parallel" else CountingHead(target, reads=reads)
    drafter = HeadDrafter(head, target, 3)
    assert isinstance(drafter, TraceableDrafter)
    generator = SpeculativeGenerator(drafter, target, k=k, fused=fused)
    expected = target.sample(PROMPTS, max_new_tokens=30, **sampling)
    assert torch.equal(generator.sample(PROMPTS, max_new_tokens=30, **sampling), expected)
    assert generator.statistics.num_draft_tokens > 0 or k != 3


def test_impossible_draft_lengths_are_rejected(workshop: Workshop) -> None:
    target = workshop.decoder(slots=1)
    with pytest.raises(ConfigurationError, match="got 200"):
        HeadDrafter(OffsetHead(target), target, 199)
    drafter = HeadDrafter(OffsetHead(target), target, 3)
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ConfigurationError, match="passes the target's hidden states"):
        drafter.propose(Commit(one.view(1, 1), one, one), sampling_tensors([Sampling()]), RoundLimits(one.tolist(), 4))


SLOTS = 4


def made(kind: str, workshop: Workshop, folder: Path) -> HeadDrafter:
    target = fresh(workshop.checkpoint(), backend="native", batch_size=SLOTS)
    if kind == "medusa":
        torch.manual_seed(2)
        config = MedusaConfig(2, 1, target.config.hidden_size, VOCABULARY, tied=False)
        networks = Heads(config, target.body.model.head, target.options.dtype)
        networks.fill({name: torch.randn(shape) for name, shape in config.shapes().items()})
        return MedusaDrafter(networks, target, Choices.of([[0], [1], [0, 0]]))
    trees = {"chain": Chain(2), "tree": StaticTree((-1, -1, 0)), "dynamic": DynamicTree(4, depth=2, width=2)}
    return heads.drafter(folder, target, 3 if kind == "dynamic" else 1, trees[kind])


@pytest.mark.parametrize("kind", ["chain", "tree", "dynamic", "medusa"])
def test_heads_skip_idle_slots(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    drafter = made(kind, workshop, tmp_path)
    assert drafter.reads is not None
    width = drafter.draft_shape.depth + 1
    features = torch.randn(SLOTS, width, 32 * max(1, len(drafter.reads.layers)))
    tokens = torch.randint(0, VOCABULARY, (SLOTS, width), dtype=torch.int32)
    commit = Commit(tokens, torch.tensor([1, 2, 3, 1], dtype=torch.int32), torch.tensor([5, 9, 1, 4]).int(), features)
    step = drafter.step(drafter.bucket(12), "full")
    caches = [one for pair in drafter.head.caches() for one in pair]

    def propose(idle: list[int]) -> list[list[list[int]]]:
        for cache in caches:
            cache.zero_()
        sampling = sampling_tensors([Sampling(0.8, seed=slot) for slot in range(SLOTS)])
        sampling.params[idle] = torch.tensor(IDLE_ROW)
        with torch.no_grad():
            found = step(commit.tokens, commit.count, commit.first_row, sampling.params, sampling.seeds, features)
        return [one.tolist() for one in found]

    whole = propose([])
    written = [one.clone() for one in caches]
    for idle in ([1], [0, 2, 3]):
        some = propose(idle)
        for slot in range(SLOTS):
            if slot not in idle:
                assert [part[slot] for part in some] == [part[slot] for part in whole]
            for cache, before in zip(caches, written, strict=True):
                assert not cache[slot].any() if slot in idle else torch.equal(cache[slot], before[slot])


def test_medusa_computes_no_matmul_for_an_idle_slot(workshop: Workshop, tmp_path: Path) -> None:
    drafter = made("medusa", workshop, tmp_path)
    assert isinstance(drafter, MedusaDrafter)
    states, seated = torch.randn(SLOTS, 32), torch.tensor([0, 1, 0, 1], dtype=torch.int32)
    whole, some = drafter.head.parallel(states, 2), drafter.head.parallel(states, 2, seated)
    assert torch.equal(some[[1, 3]], whole[[1, 3]]) and not some[[0, 2]].any()
