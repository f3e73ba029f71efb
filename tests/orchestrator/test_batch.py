"""The limits of a round are those of the plain formula whatever came before; a text that gets several tokens at once
ends where it would end token by token.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.sampling import Sampling
from paceline.core.types import IDLE, PAD, Commit, PrefillResult, RoundReport, RoundResult
from paceline.engine.batch import Batch, RoundShape, Slot
from paceline.engine.request import Request
from paceline.outputs import Statistics

BUCKETS = (16, 24, 64)


def formula(batch: Batch, reach: int | None) -> list[int]:
    """Free positions in every slot, computed from the texts."""
    longest = max((len(slot.text) for slot in batch.slots if slot), default=1)
    border = next((bucket for bucket in BUCKETS if bucket >= longest), BUCKETS[-1])
    found = []
    for slot in batch.slots:
        if slot is None:
            found.append(IDLE)
            continue
        length = len(slot.text)
        rooms = [slot.remaining - 1, border - length]
        if reach is not None and slot.request.use_speculation:
            rooms.append(reach - length + 1 if length <= reach else 0)
        found.append(max(0, min(rooms)))
    return found


@given(st.data())
def test_limits_fit_every_slot(data: st.DataObject) -> None:
    size, depth = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 5))
    reach = data.draw(st.none() | st.integers(4, 40))
    batch = Batch([None] * size, RoundShape(depth, depth + 1, reach, BUCKETS), Statistics())
    index = 0
    for _ in range(data.draw(st.integers(1, 25))):
        if None in batch.slots and data.draw(st.booleans()):
            free = batch.slots.index(None)
            prompt = (1,) * data.draw(st.integers(1, 20))
            length, drafts = len(prompt) + data.draw(st.integers(1, 40)), data.draw(st.booleans())
            request = Request(index, prompt, Sampling(), length, frozenset([0]), use_speculation=drafts)
            batch.seat(free, request)
            batch.join(free, PrefillResult(1))
            index += 1
        elif batch.active and data.draw(st.integers(0, 9)) == 0:
            batch.abort([batch.slots[batch.active[0]].request.index])  # type: ignore[union-attr]
        bounds = batch.limits()
        assert bounds.max_rounds > 1 and bounds.remaining == formula(batch, reach)
        drafts = [slot is not None and slot.request.use_speculation for slot in batch.slots]
        limits = [min(depth, left) if asked else 0 for asked, left in zip(drafts, bounds.remaining, strict=True)]
        assert bounds.max_accept == limits
        assert bounds.end_ids == (frozenset([0]) if batch.active else frozenset())
        assert bounds.max_rows == max((len(slot.text) for slot in batch.slots if slot), default=1)
        counts = [data.draw(st.integers(1, limit + 1)) for limit in bounds.max_accept]
        drawn = [data.draw(st.lists(st.sampled_from([1] * 30 + [0]), min_size=n, max_size=n)) for n in counts]
        tokens = torch.tensor([one + [PAD] * (depth + 1 - len(one)) for one in drawn], dtype=torch.int32)
        count = torch.tensor(counts, dtype=torch.int32)
        commit = Commit(tokens, count, batch.commit.first_row + batch.commit.count)
        batch.apply(RoundResult(commit, [RoundReport(drawn, [0] * size, 0.0)]))


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), max_size=8), st.integers(1, 30))
def test_several_tokens_at_once_end_a_text_like_single_tokens(parts: list[list[int]], length: int) -> None:
    request = Request(0, (), Sampling(), length, frozenset([0, 3]))
    whole, single = Slot(request), Slot(request)
    for tokens in parts:
        reasons = []
        for token in tokens:
            reasons.append(single.append(token))
            if reasons[-1] is not None:
                break
        assert whole.extend(tokens) == (len(reasons), reasons[-1])
        assert whole.text == single.text
        if reasons[-1] is not None:
            return
