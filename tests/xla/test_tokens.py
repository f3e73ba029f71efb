"""XLA gives the tokens of eager decoding, in every mode."""

from __future__ import annotations

import pytest

from paceline import SpeculativeGenerator
from paceline.auto import SamplingDecoder
from tests.decoder.tiny import Workshop

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, [5, 5]]
SLOTS = 2
LAWS: dict[str, dict[str, object]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 3, "temperature": 1.2, "top_k": 30, "top_p": 0.95, "min_p": 0.01},
}


def tokens(source: SpeculativeGenerator | SamplingDecoder, **asked: object) -> list[list[int]]:
    found: list[list[int]] = source.sample(PROMPTS, max_new_tokens=40, **asked).tolist()  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("amp", ["f32", "bf16"])
def test_plain_and_speculative_decoding(law: str, amp: str, workshop: Workshop) -> None:
    """In bf16 too: weights and caches are rounded alike, and all activations are float32."""
    wanted = tokens(workshop.pair(slots=SLOTS, amp=amp)[1], **LAWS[law])
    draft, target = workshop.pair(backend="xla", slots=SLOTS, amp=amp)
    assert tokens(target, **LAWS[law]) == wanted
    if amp == "bf16":
        return
    for fused in (True, False):
        generator = SpeculativeGenerator(draft, target, k=3, fused=fused)
        assert tokens(generator, **LAWS[law]) == wanted
        assert generator.statistics.tau > 1.5
    assert tokens(SpeculativeGenerator("ngram", target, k=3), **LAWS[law]) == wanted


def test_rejection_sampling_gives_the_tokens_of_eager_rejection_sampling(workshop: Workshop) -> None:
    made = [
        tokens(
            SpeculativeGenerator(*workshop.pair(backend=backend, slots=SLOTS), k=2, acceptor="reject"),
            **LAWS["sampled"],
        )
        for backend in ("eager", "xla")
    ]
    assert made[0] == made[1]
