"""Equality where near-ties are common: weights and caches of 16 bits, on both backends.

At one width of the verifying graph, tokens are equal by construction. On the native kernels all widths give the same
bits, so there the plain graph of one row must agree as well.
"""

from __future__ import annotations

import pytest

from paceline import SpeculativeGenerator
from tests.decoder.tiny import Workshop
from tests.equality.settings import SETTINGS, assert_rolled_back, plain, run, stumbling, texts


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("amp", ["bf16", "f16"])
def test_eager_at_one_width(workshop: Workshop, amp: str, k: int, setting: str) -> None:
    draft, target = workshop.pair(amp=amp)
    known = plain(target, SETTINGS[setting], width=k + 1)
    for source in (draft, "ngram", stumbling(known)):
        assert texts(run(SpeculativeGenerator(source, target, k=k), SETTINGS[setting])) == known  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", SETTINGS)
def test_compiled_bf16(workshop: Workshop, setting: str) -> None:
    draft, target = workshop.pair(backend="native", amp="bf16")
    known = plain(target, SETTINGS[setting], width=5)
    for source in (draft, "ngram", stumbling(known)):
        result = run(SpeculativeGenerator(source, target, k=4), SETTINGS[setting])  # type: ignore[arg-type]
        assert texts(result) == known
        if source != "ngram":
            assert_rolled_back(result)
    assert plain(target, SETTINGS[setting]) == plain(target, SETTINGS[setting], width=1) == known


@pytest.mark.parametrize("setting", SETTINGS)
def test_compiled_f16(workshop: Workshop, setting: str) -> None:
    target = workshop.decoder(backend="native", amp="f16")
    known = plain(target, SETTINGS[setting], width=5)
    result = run(SpeculativeGenerator(stumbling(known), target, k=4), SETTINGS[setting])
    assert texts(result) == known
    assert_rolled_back(result)


def test_the_formats_give_different_texts(workshop: Workshop) -> None:
    seen = [plain(workshop.decoder(amp=amp), SETTINGS["cool"], new=100) for amp in ("f32", "bf16", "f16")]
    assert seen[0] != seen[1] != seen[2]
