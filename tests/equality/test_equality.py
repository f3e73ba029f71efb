"""The headline property: with one seed, every way of decoding gives the same tokens.

f32 throughout; bf16 and f16 are in test_formats.py, the demo pair in test_demo.py.
"""

from __future__ import annotations

import pytest

from paceline import SpeculativeGenerator
from paceline.core.sampling import row_seed
from tests.decoder.tiny import Workshop, fresh
from tests.equality.settings import NEW, PROMPTS, SETTINGS, assert_rolled_back, plain, run, stumbling, texts

BACKENDS = ["eager", "native"]
SPAN = [0, 1, 4, 8]


class Expected(dict[tuple[str, str], list[list[int]]]):
    """Plain decoding of a backend and a setting, one token at a time; decoded when it is first asked for."""

    def __init__(self, workshop: Workshop) -> None:
        super().__init__()
        self._workshop = workshop

    def __missing__(self, key: tuple[str, str]) -> list[list[int]]:
        self[key] = plain(self._workshop.decoder(backend=key[0]), SETTINGS[key[1]])
        return self[key]


@pytest.fixture(scope="session")
def expected(workshop: Workshop) -> Expected:
    return Expected(workshop)


def drafts(kind: str, workshop: Workshop, backend: str, known: list[list[int]]) -> object:
    if kind == "model":
        return workshop.decoder("draft", backend=backend)
    return "ngram" if kind == "ngram" else stumbling(known)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", ["model", "ngram", "lift"])
@pytest.mark.parametrize("k", SPAN)
@pytest.mark.parametrize("backend", ["native"])  # eager: tests/contract
def test_speculation_gives_the_tokens_of_plain_decoding(
    workshop: Workshop, expected: Expected, backend: str, k: int, kind: str, setting: str
) -> None:
    target, known = workshop.decoder(backend=backend), expected[backend, setting]
    result = run(SpeculativeGenerator(drafts(kind, workshop, backend, known), target, k=k), SETTINGS[setting])  # type: ignore[arg-type]
    assert texts(result) == known
    if k == 0:
        assert result.statistics.num_draft_tokens == 0
    elif kind != "ngram":
        assert_rolled_back(result)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_does_not_depend_on_the_batch_it_is_in(
    workshop: Workshop, expected: Expected, backend: str, setting: str
) -> None:
    draft, target = workshop.pair(backend=backend, slots=1)
    generator = SpeculativeGenerator(draft, target, k=4)
    assert texts(run(generator, SETTINGS[setting])) == expected[backend, setting]  # four requests queue for one slot
    for row, prompt in enumerate(PROMPTS):
        alone = {**SETTINGS[setting], "seed": row_seed(int(str(SETTINGS[setting].get("seed", 0))), row)}
        assert texts(run(generator, alone, prompts=[prompt])) == [expected[backend, setting][row]]


def test_the_backends_agree(expected: Expected) -> None:
    for setting in SETTINGS:
        assert expected["eager", setting] == expected["native", setting]


def test_the_laws_and_the_seeds_give_different_texts(workshop: Workshop, expected: Expected) -> None:
    seen = [expected["eager", setting] for setting in SETTINGS]
    seen += [plain(workshop.decoder(), {**SETTINGS["cool"], "seed": 12})]
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rounds_without_a_proposal_may_take_a_narrower_graph(
    workshop: Workshop, expected: Expected, backend: str, setting: str
) -> None:
    target, known = workshop.decoder(backend=backend), expected[backend, setting]

    def now_and_then(tokens: list[int]) -> list[int]:
        return stumbling(known)(tokens) if len(tokens) % 4 else []

    for draft in (workshop.decoder("draft", backend=backend), now_and_then):
        generator = SpeculativeGenerator(draft, target, k=4, exact=False)
        assert texts(run(generator, SETTINGS[setting])) == known
        one = [[*PROMPTS[0]]]  # one request: when it is not drafted for, nobody is
        assert texts(run(generator, SETTINGS[setting], prompts=one)) == known[:1]
    assert ("verify", 1) in {(key.kind, key.rows) for key, _ in target._steps}


def test_more_requests_than_slots_queue(workshop: Workshop) -> None:
    draft, target = workshop.pair()
    prompts = [[i, i + 1, i] for i in range(3, 14)]
    setting = SETTINGS["cool"]
    known = plain(target, setting, prompts=prompts, new=9)
    assert texts(run(SpeculativeGenerator(draft, target, k=4), setting, prompts=prompts, new=9)) == known
    seeds = [row_seed(11, i) for i in range(len(prompts))]
    order = [7, 0, 10, 3, 4, 9, 1, 8, 2, 6, 5]
    other = {**setting, "seed": [seeds[i] for i in order]}
    shuffled = texts(run(SpeculativeGenerator("ngram", target, k=2), other, prompts=[prompts[i] for i in order], new=9))
    assert shuffled == [known[i] for i in order]


def test_decoding_to_the_last_position(workshop: Workshop) -> None:
    draft, target = workshop.pair()
    known = plain(target, SETTINGS["cool"], new=1000)
    assert {len(text) for text in known} == {target.n_positions}
    for k in (1, 8):
        assert texts(run(SpeculativeGenerator(draft, target, k=k), SETTINGS["cool"], new=1000)) == known


def test_an_eos_id_inside_a_round_ends_the_text_where_plain_decoding_ends_it(
    workshop: Workshop, expected: Expected
) -> None:
    draft, target = workshop.pair()
    for place in range(0, NEW, 3):  # of every place: test_stopping
        text = expected["eager", "cool"][0]
        setting = {**SETTINGS["cool"], "eos_token_id": text[len(PROMPTS[0]) + place]}
        known = plain(target, setting)
        assert known[0] == text[: text.index(setting["eos_token_id"], len(PROMPTS[0])) + 1]
        result = run(SpeculativeGenerator(draft, target, k=4), setting)
        assert texts(result) == known
        assert result.finish_reasons[0] == "stop"


def test_a_model_that_drafts_for_itself_is_always_accepted(workshop: Workshop) -> None:
    target = workshop.decoder()
    own = fresh(workshop.checkpoint("target"), batch_size=4)
    for setting in SETTINGS.values():
        for k in (1, 4):
            statistics = run(SpeculativeGenerator(own, target, k=k), setting, new=k * 5 + 1).statistics
            assert statistics.num_accepted_tokens == statistics.num_draft_tokens > 0
