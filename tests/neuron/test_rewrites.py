"""The rewritten operations give the bits of the originals."""

from __future__ import annotations

import pytest
import torch

from paceline.core import noise, reduce
from paceline.core.errors import BackendError
from paceline.core.sampling import seed_row
from paceline.neuron import lowering


def test_the_bits_of_a_float_are_the_machine_s() -> None:
    generator = torch.Generator().manual_seed(0)
    word = torch.randint(-(1 << 31), 1 << 31, (200_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    numbers = word.view(torch.float32)
    numbers = numbers[torch.isfinite(numbers) & (numbers.abs() >= 2.0**-126)]
    edges = [2.0**p * s for p in range(-126, 128) for s in (1, -1)] + [0.0, reduce.NEGATIVE, -1 + 2**-24, 3.4e38]
    numbers = torch.cat((numbers, torch.tensor(edges), torch.nextafter(torch.tensor(edges[:508]), torch.tensor(0.9))))
    numbers = numbers[(numbers == 0) | (numbers.abs() >= 2.0**-126)]
    assert torch.equal(lowering.view_as(numbers, torch.int32), numbers.view(torch.int32))
    small = torch.tensor([2.0**-140, -(2.0**-149), -0.0])
    assert lowering.view_as(small, torch.int32).tolist() == [0, 0, 0]


def test_a_shift_rounds_down() -> None:
    word = torch.tensor([-5, -1, 0, 7, -(1 << 31), (1 << 31) - 1], dtype=torch.int32)
    for by in (1, 3, 12, 16, 31):
        assert torch.equal(lowering.shift_right(word, by), word >> by)


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 1000, 128 * 128 + 1])
def test_a_running_count_is_exact(size: int) -> None:
    marks = (torch.rand(3, size, generator=torch.Generator().manual_seed(size)) < 0.5).to(torch.float32)
    assert torch.equal(lowering.cumsum(marks, -1), marks.cumsum(-1))
    assert torch.equal(lowering.cumsum(marks, 0), marks.cumsum(0))


def test_gathering_takes_the_leading_part_like_the_original() -> None:
    x = torch.randn(3, 5, 7)
    for dim, index in (
        (1, torch.randint(0, 5, (2, 4, 6))),
        (2, torch.randint(0, 7, (3, 5, 1))),
        (-1, torch.tensor([[[6]]])),
    ):
        assert torch.equal(lowering.gather(x, dim, index), x.gather(dim, index))
    ids = torch.randint(-(1 << 20), 1 << 20, (3, 5), dtype=torch.int32)
    found = lowering.gather(ids, 1, torch.tensor([[4], [0], [2]]))
    assert found.dtype == torch.int32 and torch.equal(found, ids.gather(1, torch.tensor([[4], [0], [2]])))


def test_rows_are_selected_as_by_an_index() -> None:
    table, at = torch.randn(9, 4), torch.randint(0, 9, (2, 3), dtype=torch.int32)
    assert torch.equal(lowering.index(table, [at]), table[at])
    for wrong in ([None], [at > 3]):
        with pytest.raises(BackendError, match="one tensor of row numbers"):
            lowering.index(table, wrong)
    with pytest.raises(BackendError, match="bits of float32"):
        lowering.view_as(table.double(), torch.int32)


def test_the_noise_is_the_same_bits_through_the_rewritten_operations() -> None:
    """All of it, over every kind of position and key."""
    keys = torch.tensor([seed_row(1), seed_row(-7)], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 4095], [77, 1 << 20, 3]], dtype=torch.int32)

    class Noise(torch.nn.Module):
        def forward(self, keys: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor]:
            return (noise.gumbel(keys, positions, 1000, traced=True),)

    from paceline.neuron.lowering import lower

    lowered = lower("noise", Noise(), (keys, positions))
    from paceline.neuron.lowering import constants_of

    _, (found,) = lowered.run(constants_of(lowered), (keys, positions))
    assert torch.equal(found, noise.gumbel(keys, positions, 1000, traced=True))


def test_functions_of_families_are_near_the_originals() -> None:
    x = torch.cat((torch.linspace(-12, 12, 100_001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0])))
    for kind in ("none", "tanh"):
        wanted = torch.nn.functional.gelu(x.double(), approximate=kind)
        error = (lowering.gelu(x, approximate=kind).double() - wanted).abs()
        assert float((error / x.double().abs().clamp(min=1)).max()) < 2e-7
    assert torch.equal(lowering.relu(x), torch.relu(x))
    scores = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)) * 30
    torch.testing.assert_close(lowering.softmax(scores, -1), scores.softmax(-1), rtol=1e-6, atol=1e-7)
