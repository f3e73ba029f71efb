"""A request that leaves its slot is forgotten, whichever way it leaves; nothing grows with the requests served."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline import FunctionDrafter, NgramDrafter, SpeculativeGenerator
from paceline.core.protocols import Drafter
from paceline.core.types import Commit, DraftShape, FeatureSpec, Proposal, RoundLimits, SamplingTensors
from paceline.target.host_verifier import HostVerifier
from tests.fakes import TableDecoder, near, table

V = 12
TARGET = table(V, seed=3, spread=2.0)
PROMPTS = [[1, 2, 1], [4], [5, 6], [7, 7, 8], [2, 2, 2, 2]]


class Register(Drafter):
    """A drafter that proposes nothing and knows who is seated; strict about the order of calls."""

    draft_shape = DraftShape.chain(2)
    reads: FeatureSpec | None = None
    max_positions: int | None = None

    def __init__(self, *, fails: bool = False) -> None:
        self.seated: set[int] = set()
        self.releases, self._fails = 0, fails

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        assert slot not in self.seated, "a slot is taken twice"
        self.seated.add(slot)
        if self._fails:
            raise LookupError("no idea")

    def finish_request(self, slot: int) -> None:
        self.seated.discard(slot)
        self.releases += 1

    def update(self, commit: Commit) -> None:
        """No round without a request; a slot that holds one is past its prompt."""
        assert self.seated
        assert all(commit.first_row[slot] > 0 for slot in self.seated)

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        return Proposal(torch.full((len(commit.tokens), 2), -1, dtype=torch.int32))


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("new", [1, 2, 9])
def test_every_request_is_released_once_before_its_slot_is_taken_again(new: int, scores: bool) -> None:
    drafter = Register()
    SpeculativeGenerator(drafter, TableDecoder(TARGET, slots=2)).sample(
        PROMPTS, max_new_tokens=new, eos_token_id=3, output_scores=scores
    )
    assert (drafter.seated, drafter.releases) == (set(), len(PROMPTS))


def test_a_stream_that_is_closed_or_dropped_releases_its_requests() -> None:
    drafter = Register()
    one = SpeculativeGenerator(drafter, TableDecoder(TARGET, slots=2))
    events = one.stream(PROMPTS)
    next(events)
    assert drafter.seated == {0, 1}
    events.close()  # type: ignore[attr-defined]
    assert drafter.seated == set()
    events = one.stream(PROMPTS)
    next(events)
    del events
    gc.collect()
    assert drafter.seated == set()


def test_a_request_that_fails_is_released() -> None:
    drafter = Register(fails=True)
    with pytest.raises(LookupError):
        SpeculativeGenerator(drafter, TableDecoder(TARGET, slots=2)).sample(PROMPTS)
    assert drafter.seated == set()

    def broken(ids: torch.Tensor, scores: object) -> bool:
        raise LookupError("no idea")

    drafter = Register()
    with pytest.raises(LookupError):
        SpeculativeGenerator(drafter, TableDecoder(TARGET)).sample(PROMPTS, stopping_criteria_list=[broken])
    assert drafter.seated == set()


@pytest.mark.parametrize("kind", ["ngram", "lift"])
def test_a_drafters_memory_is_bounded_by_the_running_requests(kind: str) -> None:
    """Idle slots get commits too: while one long text continues, nothing is added for those that are done."""
    drafter = NgramDrafter(3) if kind == "ngram" else FunctionDrafter(lambda text: text[:3], 3)
    one = SpeculativeGenerator(drafter, TableDecoder(TARGET, slots=3))
    alone = 0
    for _ in range(30):
        for event in one.stream([[1, 2, 1, 2], [4], [6, 5]], stopping_criteria_list=[_short_ones]):
            kept = drafter._texts
            assert len(kept) <= 3
            alone += set(kept) == {0} and event.index == 0
        assert not drafter._texts
    assert alone > 30, "the long text was never alone, so this shows nothing"


def _short_ones(ids: torch.Tensor, _scores: object) -> bool:
    """Ends texts that do not begin as the first prompt does."""
    return ids[0, :3].tolist() != [1, 2, 1] and ids.shape[1] >= 8


def test_the_host_verifier_forgets_texts_and_scores() -> None:
    draft = TableDecoder(near(TARGET, seed=1, spread=0.5), slots=2)
    one = SpeculativeGenerator(draft, TableDecoder(TARGET, slots=2))
    one.sample(PROMPTS, max_new_tokens=6, output_scores=True)
    assert one.engine.rounds.on_host is not None
    verifier = one.engine.rounds.on_host().verifier
    assert isinstance(verifier, HostVerifier) and verifier.scores is None and one.engine.slots == [None, None]
