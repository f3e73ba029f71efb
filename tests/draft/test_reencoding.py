"""Draft and target with different tokenizers exchange text: acceptance depends on it, the tokens of the text do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from paceline import SpeculativeGenerator, TokenizerPair
from paceline.core.errors import ConfigurationError, PairingError
from paceline.core.types import Commit, Proposal, RoundLimits, SamplingTensors
from paceline.draft.retokenizing import DraftText, RetokenizingDrafter, TargetText
from tests.draft.tokenizers_of_two import CORPUS, TEXT, by_heart, bytes_merged, marked_words
from tests.fakes import TableDecoder, table
from tests.sampled import run

COARSE, FINE, MARKED = bytes_merged(80), bytes_merged(52), marked_words()
HEATS: list[dict[str, object]] = [
    {},
    {"do_sample": True, "temperature": 0.7, "seed": 4},
    {"do_sample": True, "temperature": 1.0, "top_k": 9, "top_p": 0.9, "seed": 4},
]


class Watched(RetokenizingDrafter):
    """Keeps its proposals, and checks after each that the draft's cache is what it takes it to be."""

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        made = super().propose(commit, sampling, bounds)
        for slot, text in self._texts.items():
            ids = text.draft_ids()
            assert text.cached[: len(ids)] == (ids if text.cached else [])
            rows = self._decoder.body.cache[slot, : len(text.cached)].tolist()  # type: ignore[attr-defined]
            assert rows == text.cached
        self.proposed = [*getattr(self, "proposed", []), made.tokens.tolist()]
        return made


def decoder(tokenizer: PreTrainedTokenizerFast, *, slots: int = 2, reach: int = 192, **given: object) -> TableDecoder:
    """A random table over a tokenizer's ids; with ``script``, one that knows a text by heart."""
    script = given.pop("script", None)
    size = len(tokenizer)
    logits = table(size, seed=size, spread=2.0) if script is None else by_heart(script, size, seed=size)  # type: ignore[arg-type]
    return TableDecoder(logits, slots=slots, kv_buckets=(reach,), **given)  # type: ignore[arg-type]


def drafter(draft: TableDecoder, k: int, ours: object, theirs: object, **given: object) -> Watched:
    return Watched(draft, k, tokenizers=TokenizerPair(target=theirs, draft=ours), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ours", "theirs", "heat"),
    [(COARSE, FINE, HEATS[0]), (FINE, COARSE, HEATS[1]), (MARKED, COARSE, HEATS[2]), (COARSE, MARKED, HEATS[1])],
)
def test_retokenizing_drafts_change_no_token(
    ours: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast, heat: dict
) -> None:
    """Random models split characters and divide words as no tokenizer would; more requests than slots."""
    size = len(theirs)
    prompts = [theirs.encode(text) for text in CORPUS] + [[size - 1], [i % size for i in range(5, 50, 3)]]
    asked = {"max_new_tokens": 24, "eos_token_id": [7], "pad_token_id": 0, **heat}
    source = drafter(decoder(ours), 3, ours, theirs)
    maker = SpeculativeGenerator(source, decoder(theirs))
    for _ in range(2):
        assert torch.equal(maker.sample(prompts, **asked), decoder(theirs).sample(prompts, **asked))
    assert not source._texts and maker.statistics.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("ours", "theirs", "slots", "heat"),
    [(COARSE, FINE, 1, HEATS[0]), (FINE, COARSE, 2, HEATS[1]), (MARKED, COARSE, 2, HEATS[2])],
)
def test_a_draft_that_knows_the_text_is_accepted(
    ours: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast, slots: int, heat: dict
) -> None:
    text = TEXT if ours is not MARKED else TEXT.encode("ascii", "ignore").decode()
    known, script = ours.encode(text), theirs.encode(text)
    source = drafter(decoder(ours, slots=slots, script=known), 4, ours, theirs)
    target = decoder(theirs, slots=slots, script=script)
    prompts = [script[:4], script[:9]]
    asked = {"max_new_tokens": len(script) - 9, "eos_token_id": [], **heat}
    made = run(SpeculativeGenerator(source, target), prompts, **asked)
    assert made.sequences[1].tolist() == script and torch.equal(made.sequences, target.sample(prompts, **asked))
    # What the draft says is right; lost is only what is cut at the end of its proposals.
    assert made.statistics.acceptance_rate > 0.65 and made.statistics.tau > 2
    if theirs is FINE:  # characters of several of its tokens: the rest of one is proposed when it has begun
        begun = [i for i in range(9, len(script)) if theirs.decode(script[:i]).endswith("\ufffd")]
        assert begun


def test_the_end_id_is_proposed_as_the_targets() -> None:
    script, known = [*COARSE.encode(TEXT), 0], [*FINE.encode(TEXT), 1]
    draft, target = decoder(FINE, slots=1, script=known, eos=(1,)), decoder(COARSE, slots=1, script=script, eos=(0,))
    source = drafter(draft, 8, FINE, COARSE, eos=0)
    made = run(SpeculativeGenerator(source, target), [script[:5]])
    assert made.sequences[0].tolist() == script and made.finish_reasons == ["stop"]
    assert any(0 in rows[0] for rows in source.proposed)


def test_a_draft_with_a_bos_token_reads_it() -> None:
    ours = bytes_merged(50, bos=True)
    source = drafter(decoder(ours, slots=1), 2, ours, COARSE)
    source.add_request(0, COARSE.encode(TEXT))
    assert source._texts[0].cached[:1] == [1] and 1 not in source._texts[0].cached[1:]


def test_a_text_beyond_the_drafts_context_continues_without_drafts() -> None:
    asked = {"max_new_tokens": 60, "eos_token_id": [], **HEATS[1]}
    prompts = [COARSE.encode(CORPUS[0]), COARSE.encode(CORPUS[1]), COARSE.encode(CORPUS[0] * 5)]
    target = decoder(COARSE)
    source = drafter(decoder(FINE, reach=48), 3, FINE, COARSE)
    made = run(SpeculativeGenerator(source, target), prompts, **asked)
    assert torch.equal(made.sequences, target.sample(prompts, **asked))
    assert 0 < made.statistics.num_draft_tokens_per_pos[0] < made.statistics.num_rounds


@settings(max_examples=200)
@example(text="  ", cut=1, marked=True, fine=False)  # the first space of a text is lost
@given(
    text=st.text("achet \u00e9\u65e5", max_size=40), cut=st.integers(0, 60), marked=st.booleans(), fine=st.booleans()
)
def test_reencoded_continuations_decode_to_the_original_text(text: str, cut: int, marked: bool, fine: bool) -> None:
    tokenizer = MARKED if marked else FINE if fine else COARSE
    ids = tokenizer.encode(text)
    side = TargetText(tokenizer, ids[:cut])
    whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert whole.startswith(side.text)
    rest = side.continuation(whole[len(side.text) :])
    if rest is None:
        assert marked  # a space in front of a text, which it loses
    else:
        assert tokenizer.decode([*ids[:cut], *rest], clean_up_tokenization_spaces=False) == whole


def test_a_continuation_that_fits_is_decoded_once() -> None:
    calls: list[list[int]] = []

    class Counting:
        encode = staticmethod(COARSE.encode)

        def decode(self, ids: list[int], **options: object) -> str:
            calls.append(ids)
            return COARSE.decode(ids, **options)  # type: ignore[no-any-return, arg-type]

    side = TargetText(Counting(), COARSE.encode(TEXT)[:9])
    calls.clear()
    assert side.continuation(TEXT[len(side.text) :]) and len(calls) == 1


@pytest.mark.parametrize("tokenizer", [COARSE, FINE, MARKED])
def test_only_the_end_of_a_long_text_is_reencoded(tokenizer: PreTrainedTokenizerFast) -> None:
    class Counting:
        longest = 0

        def encode(self, text: str, **options: object) -> list[int]:
            Counting.longest = len(text)
            return tokenizer.encode(text, **options)  # type: ignore[no-any-return]

        decode = staticmethod(tokenizer.decode)

    text, grown = (CORPUS[0] + " ") * 40, DraftText(Counting())
    for end in range(0, len(text), 7):
        assert grown.ids(text[:end]) == tokenizer.encode(text[:end])
    assert Counting.longest < len(text) / 2


def test_a_retokenizing_pair_without_tokenizers_is_rejected(tmp_path: Path) -> None:
    draft, target = decoder(FINE), decoder(COARSE)
    with pytest.raises(PairingError, match=r"target's tokenizer for 'retokenize', got none"):
        SpeculativeGenerator(draft, target, vocabulary="retokenize")
    target.folder = draft.folder = tmp_path
    with pytest.raises(PairingError, match=r"expected the target's tokenizer.*expected a tokenizer"):
        SpeculativeGenerator(draft, target, vocabulary="retokenize")
    COARSE.save_pretrained(tmp_path / "target")
    target.folder = tmp_path / "target"
    with pytest.raises(PairingError, match="expected the draft's tokenizer for 'retokenize', got none"):
        SpeculativeGenerator(draft, target, vocabulary="retokenize")
    FINE.save_pretrained(tmp_path)
    made = SpeculativeGenerator(draft, target, vocabulary="retokenize")
    prompts = [COARSE.encode(CORPUS[0])]
    assert torch.equal(made.sample(prompts, max_new_tokens=9), target.sample(prompts, max_new_tokens=9))
    pair = TokenizerPair(target=COARSE, draft=FINE.backend_tokenizer)  # type: ignore[arg-type]
    with pytest.raises(PairingError, match=r"got Tokenizer as the draft's"):
        SpeculativeGenerator(draft, target, vocabulary=pair)
    with pytest.raises(ConfigurationError, match="cannot share a graph"):
        SpeculativeGenerator(draft, target, vocabulary="retokenize", fused=True).sample(prompts, max_new_tokens=9)
