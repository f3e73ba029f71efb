"""A table model whose distribution is known, in place of a network, with a cache that checks itself; no tests.

The next token depends on the last two, by a fixed random table. The model reads the tokens it depends on from its
cache, so a wrong cache row changes what is drawn; when it is told what was committed, it asserts at every forward that
every row it may look at holds the committed token, or one that was fed in the same round.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from paceline import SpeculativeGenerator, build
from paceline.auto import SamplingDecoder
from paceline.core.protocols import Drafter, Reading
from paceline.core.types import (
    Commit,
    FeatureSpec,
    Proposal,
    RoundLimits,
    RoundReport,
    RoundResult,
    SamplingTensors,
)
from paceline.decoder.backends.base import Step
from paceline.decoder.backends.eager import EagerBackend
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.kernels.protocol import CachePosition
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.models.config import ModelConfig, RopeConfig
from paceline.decoder.options import DecoderOptions, LoadOptions
from paceline.engine.adaptive import DraftLengthController
from paceline.engine.rounds import Rounds
from tests.target.many_rounds import run_rounds

EMPTY = -7  # a cache row that nobody has written


def config(vocab_size: int, *, eos: tuple[int, ...] = (), pad: int | None = None) -> ModelConfig:
    return ModelConfig(
        "llama", vocab_size, 8, 8, 1, 1, 1, 8, 1e-6, 2048, RopeConfig(), False, False, False, "silu", eos, pad, None
    )


def table(vocab_size: int, *, seed: int, spread: float = 1.0) -> Tensor:
    """Logits [V, V, V]: of what follows two tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, vocab_size, vocab_size, generator=generator) * spread


def near(logits: Tensor, *, seed: int, spread: float) -> Tensor:
    """A table that resembles another one: what a draft is to its target."""
    return logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)) * spread


class TableBody:
    """Stands for `paceline.decoder.decoder.ModelWithCache`. A hidden state is a token and the one before it."""

    def __init__(self, logits: Tensor, shape: ModelConfig, *, slots: int, positions: int, slack: int) -> None:
        self.config, self.kernels = shape, TorchKernels()
        self._table, self._positions = logits, positions
        self.cache = torch.full((slots, positions + slack), EMPTY, dtype=torch.int64)
        self.stamp = torch.zeros(slots, positions + slack, dtype=torch.int64)
        self.truth: Truth | None = None
        self.caches = [(self.cache, self.stamp)]
        self.forwards = 0
        self.real_rows = lambda *_: None  # every slot is computed
        self.skips_idle = False

    def __call__(
        self, tokens: Tensor, place: CachePosition, reads: FeatureSpec | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """tokens [b, T] -> hidden [b, T, 2], which are the features too."""
        self.forwards += 1
        slots = place.slots.to(torch.int64)
        rows = place.row.unsqueeze(1).to(torch.int64) + torch.arange(tokens.shape[1])
        if self.truth is not None:
            self._check(slots, rows[:, 0])
        self.cache[slots.unsqueeze(1), rows] = tokens.to(torch.int64)
        self.stamp[slots.unsqueeze(1), rows] = self.truth.rounds if self.truth else 0
        above = rows - 1
        if place.tree is not None:
            above = rows[:, :1] + place.tree.parents
        before = self.cache[slots.unsqueeze(1), above.clamp(min=0)]
        before = torch.where(above >= 0, before, 0)
        seen = torch.stack((before, tokens.to(torch.int64)), -1)
        beyond = (before[:, 0] < 0) & (not place.padded)  # behind a prompt that is being read
        if self.truth is not None:  # a text this model cannot follow, or none: anything may come
            beyond = (self.truth.length[slots] > self._positions) | (self.truth.length[slots] == 0)
        seen = torch.where(beyond.view(-1, 1, 1), seen.clamp(min=0), seen)
        assert bool((seen >= 0).all()), "a row was read that nobody has written"
        hidden = seen.to(torch.float32)
        return hidden, None if reads is None else hidden

    def window(self, tokens: Tensor, row: Tensor, reach: int, **asked: Any) -> tuple[Tensor, Tensor | None]:
        tree, reads, used = asked.get("tree"), asked.get("reads"), asked.get("used")
        row = row.clamp(max=self._positions - 1)
        place = CachePosition(row, torch.full_like(row, tokens.shape[1]), torch.arange(len(row)), reach, tree=tree)
        hidden, features = self(tokens, place, reads)
        if used is not None:  # other rows are not computed
            place_of = torch.arange(tokens.shape[1])
            line, column = (place_of >= used.unsqueeze(1)).nonzero(as_tuple=True)
            hidden[line, column] = 0
            for cache in (self.cache, self.stamp):
                cache[line, row[line].to(torch.int64) + column] = EMPTY
        return hidden, features

    def compact_path(self, row: Tensor, path: Tensor) -> None:
        row = row.clamp(max=self._positions - 1).to(torch.int64).unsqueeze(1)
        to = row + torch.arange(1, path.shape[1] + 1)
        source = torch.where(path < 0, to, row + path)
        line = torch.arange(len(row)).unsqueeze(1)
        for cache in (self.cache, self.stamp):
            cache[line, to] = cache[line, source]

    def copy_prompt(self, slot: int, like: int, count: int) -> None:
        for cache in (self.cache, self.stamp):
            cache[slot, :count] = cache[like, :count]

    def logits(self, hidden: Tensor, real: Tensor | None = None) -> Tensor:
        pair = hidden.to(torch.int64)
        return self._table[pair[..., 0], pair[..., 1]]

    def sample_tokens(
        self, hidden: Tensor, positions: Tensor, sampling: SamplingTensors, *, used: Tensor | None = None
    ) -> Tensor:
        return self.kernels.sample_tokens(self.logits(hidden), positions, sampling)

    def _check(self, slots: Tensor, row: Tensor) -> None:
        assert self.truth is not None
        width = min(self.truth.text.shape[1], self.cache.shape[1])
        known_ids = self.config.vocab_size - 1  # a draft of fewer ids reads what it lacks as its last one
        text, length = self.truth.text[slots, :width].clamp(max=known_ids), self.truth.length[slots].unsqueeze(1)
        place = torch.arange(width)
        read = (place < row.unsqueeze(1)) & (length > 0) & (length <= self._positions)  # past it nobody asks
        known = read & (place < length)
        wrong = known & (self.cache[slots, :width] != text)
        assert not bool(wrong.any()), f"the cache is not the committed prefix at {wrong.nonzero()[0].tolist()}"
        ahead = read & (place >= length)
        stale = ahead & (self.stamp[slots, :width] != self.truth.rounds)
        assert not bool(stale.any()), f"a row of an earlier round is read at {stale.nonzero()[0].tolist()}"


class TableDecoder(SamplingDecoder):
    """A decoder over a table: the real graphs, loop and cache discipline, without a network."""

    def __init__(
        self,
        logits: Tensor,
        *,
        slots: int = 1,
        kv_buckets: tuple[int, ...] = (64,),
        eos: tuple[int, ...] = (),
        pad: int | None = None,
    ) -> None:
        self.config = config(logits.shape[-1], eos=eos, pad=pad)
        self.options = DecoderOptions(LoadOptions(batch_size=slots, amp="f32"), kv_buckets, (8, 16))
        self.backend, self.kv_buckets, self.batch_buckets = EagerBackend(), kv_buckets, (slots,)
        self.body = TableBody(logits, self.config, slots=slots, positions=kv_buckets[-1], slack=128)
        self.folder = None
        self._made: dict[tuple[GraphKey, object], tuple[list[torch.Size], Step]] = {}
        self._holder = self.last_holder = None

    def graph(
        self,
        key: GraphKey,
        make: Callable[[TableBody, int], nn.Module],
        example: Sequence[Tensor],
        *,
        guest: dict[str, object] | None = None,
        owner: object | None = None,
    ) -> Step:
        """Make a graph as the real one does, and raise if shapes change, as a compiled graph would."""
        shapes = [x.shape for x in example]
        full = (key, owner)
        if full not in self._made:
            module = make(self.body, key.bucket)
            fused = key.draft and key.is_round
            self._made[full] = shapes, FusedTableStep(self.body, module) if fused else module
        assert self._made[full][0] == shapes, f"{full} was compiled for {self._made[full][0]} and is given {shapes}"
        return self._made[full][1]


class FusedTableStep:
    """A fused round over table models. Like native code it runs several rounds in one call."""

    def __init__(self, body: TableBody, module: nn.Module) -> None:
        self._body, self._module = body, module

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        if self._body.truth is not None:
            self._body.truth.go_on(Commit(*inputs[:3]))
        return list(self._module(*inputs))

    def run_rounds(
        self, inputs: list[Tensor], seconds: float, limits: RoundLimits
    ) -> tuple[list[RoundReport], list[Tensor]]:
        return run_rounds(self, inputs, seconds, limits)


class Truth:
    """Tokens committed to every slot, from the commits only."""

    def __init__(self, slots: int, positions: int) -> None:
        self.text = torch.full((slots, positions), -1, dtype=torch.int64)
        self.length = torch.zeros(slots, dtype=torch.int64)
        self.joining = torch.zeros(slots, dtype=torch.bool)  # a prompt is being read
        self.rounds = 0

    def admit(self, slot: int, text: Sequence[int]) -> None:
        self.text[slot, : len(text)] = torch.tensor(text)
        self.length[slot] = len(text)

    def go_on(self, commit: Commit) -> None:
        """Input of a graph: the last commit or, if rounds run in a row, one that the host has not received yet."""
        fresh = (commit.first_row == self.length) & (commit.first_row > 0) & ~self.joining
        if bool(fresh.any()):
            length = self.length
            self.add(commit)
            self.length = torch.where(fresh, self.length, length)

    def add(self, commit: Commit) -> None:
        live = (commit.first_row == self.length) & ~self.joining
        self.rounds += 1
        for place in range(commit.tokens.shape[1]):
            at = (commit.first_row + place).to(torch.int64)
            here = live & (place < commit.count) & (at < self.text.shape[1])
            self.text[here, at[here]] = commit.tokens[here, place].to(torch.int64)
        after = (commit.first_row + commit.count).to(torch.int64)
        self.length = torch.where(live, after, 0)  # an idle slot is at row 0


class WatchedRound:
    """A round that shows table models what was committed, so that they can check their caches."""

    def __init__(self, inner: Rounds, bodies: Sequence[TableBody]) -> None:
        self._inner, self._bodies = inner, bodies
        self.truth = Truth(*bodies[0].cache.shape)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        truth, reading = self.truth, self._inner.start(slot, prompt, sampling)
        for body in self._bodies:
            body.truth = truth
        while True:
            truth.rounds, truth.joining[slot] = truth.rounds + 1, False
            truth.admit(slot, prompt)
            try:
                next(reading)
            except StopIteration as done:
                truth.admit(slot, [*prompt, done.value.token])
                return done.value
            truth.joining[slot], truth.length[slot] = True, 0
            yield

    def __call__(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> RoundResult:
        self.truth.length[commit.first_row == 0] = 0  # a slot whose request is done
        self.truth.rounds += 1
        done = self._inner(commit, sampling, bounds)
        self.truth.add(done.commit)  # those before are known: the graph of the next one has read them
        return done


class Around(Drafter):
    """A drafter around another one, which sees the same; without more it proposes the same."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.draft_shape, self.reads, self.max_positions = inner.draft_shape, inner.reads, inner.max_positions

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        self.inner.add_request(slot, prompt, features)

    def finish_request(self, slot: int) -> None:
        self.inner.finish_request(slot)

    def update(self, commit: Commit) -> None:
        self.inner.update(commit)

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        return self.inner.propose(commit, sampling, limits)


class AnyLength(DraftLengthController):
    """Any draft length in every round, by dice."""

    def choose(self, deepest: int) -> int:
        self.turn = getattr(self, "turn", 6) + 1
        return random.Random(self.turn).choice(self.draft_lengths)


class Checked(SpeculativeGenerator):
    """A generator over table decoders whose caches are checked at every forward."""

    def __init__(self, draft: object, target: CompiledDecoder, **options: object) -> None:
        super().__init__(draft, target, **options)  # type: ignore[arg-type]
        bodies = [decoder.body for decoder in self.decoders]
        watch_rounds(self, lambda round_: WatchedRound(round_, bodies))  # type: ignore[arg-type]


def watch_rounds(generator: SpeculativeGenerator, wrap: Callable[[Rounds], Rounds]) -> None:
    """Put something around the rounds of a generator."""
    generator.engine.rounds = wrap(generator.engine.rounds)


def rebuild(
    generator: SpeculativeGenerator, *, controller: DraftLengthController | None = None, exact: bool = True
) -> None:
    """Have the engine of a generator built with other settings; what watches its rounds continues."""
    target, drafter, config = generator.target, generator.drafter, generator.config
    config = config.model_copy(update={"exact": config.exact and exact})
    made = build.engine(target, drafter, config, rule=generator._rule, controller=controller)
    if isinstance(generator.engine.rounds, WatchedRound):
        generator.engine.rounds._inner = made.rounds
        made.rounds = generator.engine.rounds
    generator.engine = made


def softmax(logits: Tensor) -> np.ndarray:
    return torch.softmax(logits.double(), -1).numpy()


def joint(logits: Tensor, before: int, last: int) -> np.ndarray:
    """The exact distribution of the next three tokens, [V, V, V]."""
    distribution = softmax(logits)
    return distribution[before, last][:, None, None] * distribution[last][:, :, None] * distribution


def misfit(samples: np.ndarray, distribution: np.ndarray) -> float:
    """p-value of a chi-square test of samples [n, ...] of ids against a distribution; cells with few are joined."""
    distribution = distribution.ravel() / distribution.sum()
    shape = (round(len(distribution) ** (1 / samples.shape[1])),) * samples.shape[1]
    seen = np.bincount(np.ravel_multi_index(tuple(samples.T), shape), minlength=len(distribution)).astype(float)
    expected = distribution * len(samples)
    if seen[expected == 0].any():
        return 0.0
    rare = expected < 5
    observed, wanted = [*seen[~rare]], [*expected[~rare]]
    if expected[rare].sum() > 0:
        observed.append(seen[rare].sum())
        wanted.append(expected[rare].sum())
    if len(wanted) == 1:
        return 1.0  # all mass in one cell, and nothing was seen outside it
    return float(stats.chisquare(observed, wanted).pvalue)


def scripted(script: Sequence[int], vocab_size: int) -> Tensor:
    """A table that continues with the script after its first two tokens; every pair in it must be unlike the others."""
    logits = torch.zeros(vocab_size, vocab_size, vocab_size)
    pairs = list(zip([0, *script], script, strict=False))
    assert len(set(pairs[:-1])) == len(pairs) - 1, "a pair comes twice, so what follows it is not clear"
    for (before, last), token in zip(pairs, script[1:], strict=False):
        logits[before, last, token] = 50.0
    return logits
