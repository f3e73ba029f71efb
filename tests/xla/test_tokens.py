"""XLA gives the tokens of eager decoding, in every mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import SpeculativeGenerator, TokenizerPair
from paceline.auto import SamplingDecoder
from paceline.draft.retokenizing import RetokenizingDrafter
from tests.decoder import batched
from tests.decoder.headed import HEADED
from tests.decoder.tiny import Workshop
from tests.draft.tokenizers_of_two import CORPUS, bytes_merged
from tests.orchestrator.test_trees import PROMPTS as FOUR
from tests.orchestrator.test_trees import Orchard

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, [5, 5]]
SLOTS = 2
SETTINGS: dict[str, dict[str, object]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 3, "temperature": 1.2, "top_k": 30, "top_p": 0.95, "min_p": 0.01},
}


def tokens(source: SpeculativeGenerator | SamplingDecoder, **asked: object) -> list[list[int]]:
    found: list[list[int]] = source.sample(PROMPTS, max_new_tokens=40, **asked).tolist()  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("amp", ["f32", "bf16"])
def test_plain_and_speculative_tokens_equal_eager(setting: str, amp: str, workshop: Workshop) -> None:
    """In bf16 XLA's matmuls round what they read to 16 bits, which `eager` does not: modes are compared on one
    backend.
    """
    draft, target = workshop.pair(backend="xla", slots=SLOTS, amp=amp)
    wanted = tokens(target, **SETTINGS[setting])
    if amp == "f32":
        assert wanted == tokens(workshop.pair(backend="eager", slots=SLOTS, amp=amp)[1], **SETTINGS[setting])
    for fused in (True, False):
        generator = SpeculativeGenerator(draft, target, k=3, fused=fused)
        assert tokens(generator, **SETTINGS[setting]) == wanted
        assert generator.statistics.tau > 1.5
    assert tokens(SpeculativeGenerator("ngram", target, k=3), **SETTINGS[setting]) == wanted


@pytest.mark.parametrize("heads", HEADED)
def test_tokens_with_heads_equal_eager(heads: str, workshop: Workshop, tmp_path: Path) -> None:
    """A drafter whose features stay on the device: three prompts for two slots, so that some are fetched in between."""
    seen = []
    for backend in ("eager", "xla"):
        generator = HEADED[heads](workshop.decoder(backend=backend, slots=SLOTS), tmp_path / backend)
        found = [
            generator.sample([*PROMPTS, [7] * 5], max_new_tokens=30, return_dict=True, **SETTINGS[setting])
            for setting in SETTINGS
        ]
        assert all(one.statistics.num_drafts for one in found)
        seen.append([(one.sequences.tolist(), one.statistics.num_accepted_tokens_per_pos) for one in found])
    assert seen[0] == seen[1]


def test_tokens_with_trees_equal_eager(workshop: Workshop) -> None:
    """Trees verified in a separate graph, with parents as data, and kept."""
    made = []
    for backend in ("eager", "xla"):
        target = workshop.decoder(backend=backend)
        plain = target.sample(FOUR, max_new_tokens=20, return_dict=True)
        texts = [row[:length].tolist() for row, length in zip(plain.sequences, plain.lengths, strict=True)]
        done = SpeculativeGenerator(Orchard(texts, grown=True), target).sample(
            FOUR, max_new_tokens=20, return_dict=True
        )
        assert done.statistics.tau > 1.3
        made += [plain.sequences.tolist(), done.sequences.tolist()]
    assert made[1:] == made[:-1]


@pytest.mark.parametrize("fused", [None, False])
def test_adaptive_draft_lengths_keep_the_tokens(workshop: Workshop, fused: bool | None) -> None:
    """Chosen draft lengths depend on time and change no token; each is tried at first."""
    lengths, setting = (0, 1, 3), SETTINGS["sampled"]
    wanted = tokens(workshop.pair(backend="eager", slots=SLOTS)[1], **setting)
    generator = SpeculativeGenerator(*workshop.pair(backend="xla", slots=SLOTS), k=lengths, fused=fused)
    assert tokens(generator, **setting) == wanted
    assert set(generator.statistics.draft_lengths) == set(lengths)


def test_typical_acceptance_equals_eager(workshop: Workshop, tmp_path: Path) -> None:
    """Typical acceptance is lossy: tokens differ from plain decoding, but are the same on both backends."""
    seen = []
    for backend in ("eager", "xla"):
        own = HEADED["medusa"](workshop.decoder(backend=backend, slots=SLOTS), tmp_path / backend)
        generator = SpeculativeGenerator(own.drafter, own.target, acceptor="typical")
        done = generator.sample(PROMPTS, max_new_tokens=24, return_dict=True, do_sample=True, seed=3, temperature=0.9)
        seen.append((done.sequences.tolist(), done.statistics.num_accepted_tokens_per_pos))
    assert seen[0] == seen[1]


def test_several_plain_steps_in_one_graph_equal_single_steps(workshop: Workshop) -> None:
    for setting in SETTINGS.values():
        wanted = tokens(workshop.pair(backend="eager", slots=SLOTS)[1], **setting)
        assert (
            tokens(SpeculativeGenerator(None, workshop.pair(backend="xla", slots=SLOTS)[1], k=4), **setting) == wanted
        )


def test_drafts_of_another_tokenizer_keep_the_tokens(workshop: Workshop) -> None:
    """Through text, on the host; the draft's graphs are XLA's. Its tokenizer joins letters, the target's does not."""
    theirs, ours = bytes_merged(52), bytes_merged(80)
    made = []
    for backend in ("eager", "xla"):
        draft, target = workshop.pair(backend=backend, slots=SLOTS)
        source = RetokenizingDrafter(draft, 3, tokenizers=TokenizerPair(target=theirs, draft=ours))
        prompts = [theirs.encode(text) for text in CORPUS[:3]]
        done = SpeculativeGenerator(source, target).sample(prompts, max_new_tokens=20, return_dict=True)
        made.append((done.sequences.tolist(), done.statistics.num_draft_tokens_per_pos))
    assert made[0] == made[1] and sum(made[0][1])


def test_rejection_sampling_equals_eager(workshop: Workshop) -> None:
    made = [
        tokens(
            SpeculativeGenerator(*workshop.pair(backend=backend, slots=SLOTS), k=2, acceptor="reject"),
            **SETTINGS["sampled"],
        )
        for backend in ("eager", "xla")
    ]
    assert made[0] == made[1]


@pytest.mark.parametrize("mode", [mode for mode in batched.MODES if "static" not in mode])
def test_batch_buckets_keep_the_tokens_of_one_graph(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Those of one graph by XLA, and of plain decoding, eager."""
    batched.check_buckets(workshop, mode, tmp_path, monkeypatch, backend="xla")
