"""Several fused rounds in one graph, with drafters whose features stay on the device between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.types import RoundResult
from paceline.decoder.backends.eager import EagerBackend
from paceline.target.verifier import CompiledVerifier
from tests.decoder.headed import HEADED
from tests.decoder.tiny import Workshop, fresh

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, [5, 5], [7] * 5]
ASKED = {"max_new_tokens": 24, "do_sample": True, "seed": 1, "temperature": 0.8}
ROUNDS = 3
KINDS = ("medusa", "eagle 1, chain", "eagle 2", "eagle 3, static tree")


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_of_heads_are_the_same_in_one_graph(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Features go from round to round inside it, and come out where a third prompt comes in."""
    looks: list[int] = []
    fused = CompiledVerifier.fused

    def counting(*given: object, **more: object) -> RoundResult:
        result = fused(*given, **more)  # type: ignore[arg-type]
        looks.append(len(result.reports))
        return result

    monkeypatch.setattr(CompiledVerifier, "fused", counting)
    monkeypatch.setattr(EagerBackend, "device_state", True)
    found = []
    for rounds in (1, ROUNDS):
        monkeypatch.setattr(EagerBackend, "rounds_in_graph", rounds)
        target = fresh(workshop.checkpoint(), batch_size=2)
        generator = HEADED[kind](target, tmp_path)
        looks.clear()
        done = generator.sample(PROMPTS, return_dict=True, **ASKED)
        found.append((done.sequences.tolist(), done.statistics.num_rounds, done.statistics.num_accepted_tokens_per_pos))
        assert set(looks) == {1, rounds}
    assert found[0] == found[1] and sum(found[0][2])
    assert any(key.kept and key.variant == f"{ROUNDS} rounds" for key, _ in target._steps)


def test_they_are_compiled_ahead(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagerBackend, "device_state", True)
    monkeypatch.setattr(EagerBackend, "rounds_in_graph", ROUNDS)
    target = fresh(workshop.checkpoint(), batch_size=2)
    generator = HEADED["eagle 1, chain"](target, tmp_path)
    generator.compile()
    made = {key for key, _ in target._steps}
    assert sum(key.variant == f"{ROUNDS} rounds" for key in made)
    generator.sample(PROMPTS, **ASKED)
    assert {key for key, _ in target._steps} == made
