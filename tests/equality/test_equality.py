"""Things that change no text, beyond the matrix: its batch, its place in the queue, narrower graphs.

And where equality needs one width of graphs, or is that of a seed alone.
"""

from __future__ import annotations

import pytest

from paceline import SpeculativeGenerator
from paceline.core.sampling import row_seed
from tests.decoder.tiny import Workshop, fresh
from tests.equality.settings import PROMPTS, SETTINGS, assert_rolled_back, plain, run, stumbling, texts


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


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_text_does_not_depend_on_the_batch_it_is_in(
    workshop: Workshop, expected: Expected, backend: str, setting: str
) -> None:
    draft, target = workshop.pair(backend=backend, slots=1)
    generator = SpeculativeGenerator(draft, target, k=4)
    assert texts(run(generator, SETTINGS[setting])) == expected[backend, setting]  # four requests queue for one slot
    for row, prompt in enumerate(PROMPTS):
        alone = {**SETTINGS[setting], "seed": row_seed(int(str(SETTINGS[setting].get("seed", 0))), row)}
        assert texts(run(generator, alone, prompts=[prompt])) == [expected[backend, setting][row]]


def test_sampling_settings_and_seeds_give_different_texts(workshop: Workshop, expected: Expected) -> None:
    seen = [expected["eager", setting] for setting in SETTINGS]
    seen += [plain(workshop.decoder(), {**SETTINGS["cool"], "seed": 12})]
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])


@pytest.mark.parametrize(("backend", "setting"), [("eager", "greedy"), ("native", "hot and cut")])
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


def test_requests_beyond_the_slots_queue(workshop: Workshop) -> None:
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


def test_decoding_reaches_the_last_position(workshop: Workshop) -> None:
    draft, target = workshop.pair()
    known = plain(target, SETTINGS["cool"], new=1000)
    assert {len(text) for text in known} == {target.n_positions}
    for k in (1, 8):
        assert texts(run(SpeculativeGenerator(draft, target, k=k), SETTINGS["cool"], new=1000)) == known


def test_a_model_that_drafts_for_itself_is_always_accepted(workshop: Workshop) -> None:
    target = workshop.decoder()
    own = fresh(workshop.checkpoint("target"), batch_size=4)
    for setting in SETTINGS.values():
        for k in (1, 4):
            statistics = run(SpeculativeGenerator(own, target, k=k), setting, new=k * 5 + 1).statistics
            assert statistics.num_accepted_tokens == statistics.num_draft_tokens > 0


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("amp", "k"), [("bf16", 4), ("f16", 1)])
def test_eager_keeps_the_tokens_at_one_width(workshop: Workshop, amp: str, k: int, setting: str) -> None:
    """Near-ties are common in 16 bits. On the native kernels all widths give the same bits: the matrix has them."""
    draft, target = workshop.pair(amp=amp)
    known = plain(target, SETTINGS[setting], width=k + 1)
    for source in (draft, "ngram", stumbling(known)):
        assert texts(run(SpeculativeGenerator(source, target, k=k), SETTINGS[setting])) == known  # type: ignore[arg-type]


def test_native_gives_the_same_text_at_every_width(workshop: Workshop) -> None:
    target = workshop.decoder(backend="native", amp="bf16")
    for setting in SETTINGS.values():
        assert plain(target, setting) == plain(target, setting, width=1) == plain(target, setting, width=5)


def test_the_formats_give_different_texts(workshop: Workshop) -> None:
    seen = [plain(workshop.decoder(amp=amp), SETTINGS["cool"], new=100) for amp in ("f32", "bf16", "f16")]
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_rejection_gives_the_same_text_for_the_same_seed(workshop: Workshop, backend: str, setting: str) -> None:
    draft, target = workshop.pair(backend=backend)
    generator = SpeculativeGenerator(draft, target, k=4, acceptor="reject")
    once, twice = (run(generator, SETTINGS[setting]) for _ in range(2))
    assert texts(once) == texts(twice)
    assert_rolled_back(once)
    if setting != "greedy":
        other = run(generator, {**SETTINGS[setting], "seed": 99})
        assert texts(other) != texts(once)
