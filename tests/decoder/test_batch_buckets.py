"""Rounds of the slots in use: graphs for 1, 2 and 4 of four slots, which change no token."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.decoder import steps
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.options import LoadOptions, decoder_options
from paceline.decoder.prefix_cache import CachedPrompt
from paceline.draft.base import TextDrafter
from tests.decoder import batched
from tests.decoder.tiny import Workshop, fresh

FEW = ("several plain steps", "model, of several lengths", "eagle 3, dynamic tree")
"""What `make test` asks; the equality matrix has all drafters on graphs for 1, 2 and 4 slots."""


@pytest.mark.parametrize(
    "mode", [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in batched.MODES]
)
def test_batch_buckets_change_no_token(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Requests join and leave, so that rounds take more slots and fewer."""
    for rounds in batched.check_buckets(workshop, mode, tmp_path, monkeypatch, backend="eager").values():
        runs = [size for size, _ in groupby(rounds)]
        assert runs[0] == 4 and runs[-3:] == [1, 2, 1]


class Stays(TextDrafter[list[int]]):
    """A drafter whose requests cannot move: it repeats the last token."""

    movable = False

    def propose_text(self, text: list[int], limit: int) -> list[int]:
        return text[-1:] * limit


def test_requests_stay_where_a_drafter_cannot_move_them(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then rounds take as many slots as the highest one in use asks for, and the tokens are the same."""
    target = fresh(workshop.checkpoint(), backend="eager", batch_size=4)
    made = SpeculativeGenerator(Stays(2), target)
    seen = batched.watch(monkeypatch, target)
    wanted = batched.texts(SpeculativeGenerator(None, workshop.decoder(), k=0), "greedy")
    assert batched.texts(made, "greedy") == wanted
    assert any(lines > batched.bucket(seated) for lines, seated in seen) and (1, 1) in seen


def test_a_prompt_that_moved_is_still_shared(workshop: Workshop) -> None:
    target = fresh(workshop.checkpoint(), backend="eager", batch_size=4)
    prompt, known = tuple(batched.PROMPTS[3]), target.prefix_cache
    with target.held_by(object()):
        wanted, _ = steps.prefill(target, 3, prompt)
        known.add(3, CachedPrompt(prompt, None, wanted, None))
        steps.move_slot(target, 3, 1, rows=len(prompt))
        found = known.find(prompt, None)
        assert found is not None and found.slot == 1
        for pair in target.body.caches:
            for cache in pair:
                assert torch.equal(cache[1, :, : len(prompt)], cache[3, :, : len(prompt)])
        known.finish(1)
        assert known.find(prompt, None) is None


@pytest.mark.parametrize(("size", "buckets"), [(1, (1,)), (6, (1, 2, 4, 6)), ([6], (6,)), ([2, 6], (2, 6))])
def test_a_number_gives_powers_of_two_and_a_list_is_kept(size: int | list[int], buckets: tuple[int, ...]) -> None:
    options = decoder_options(LoadOptions(batch_size=size, amp="f32"), 64)
    assert (options.batch_size, options.batch_buckets) == (buckets[-1], buckets)


def test_kernels_that_skip_idle_slots_have_one_graph(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchKernels, "skips_padding", True)
    target = fresh(workshop.checkpoint(), backend="eager", batch_size=4)
    assert target.batch_buckets == (4,) and [target.batch_for(used) for used in (1, 2, 4, None)] == [0] * 4
