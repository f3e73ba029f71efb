"""Replays are exact: a replay of a trace counts what a run counts, for every drafter, depth, limit and batch."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.core.errors import ConfigurationError, TraceError
from paceline.draft_spec import DraftSpec, parse_draft
from paceline.engine.request import Request, SamplingParams
from paceline.experiments.prompts import Prompt
from paceline.experiments.questions import Policy, ask, best_per_text, drafter_of, search
from paceline.experiments.record_traces import record
from paceline.experiments.replay import ReplayDrafter, replay
from paceline.experiments.round_times import RoundTimes
from paceline.experiments.trace import RecordedDrafter, Trace, TraceText, check_target, load_trace, save_trace
from paceline.outputs import GenerationResult, Statistics
from tests.contract.drafters import ROWS, Home
from tests.decoder.tiny import Workshop

PROMPTS = [[5, 9, 5, 9, 5], [7, 7, 8, 7, 7], [3, 4, 5, 3, 4], [11, 30, 2, 11, 30, 2, 11]]
PARAMS = SamplingParams(max_new_tokens=19, eos_token_id=[3, 40], do_sample=True, temperature=0.8, seed=[4, 5, 6, 7])
LONG = SamplingParams(sequence_length=128, eos_token_id=[], seed=[1, 2])
TEXT_ROWS = ("ngram", "ngram, first", "suffix", "suffix, with a corpus", "none", "none, by name")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


Homes = Callable[[int], Home]


@pytest.fixture
def homes(workshop: Workshop, tmp_path: Path) -> Iterator[Homes]:
    """Parts of drafters, by the number of slots."""
    with ExitStack() as stack:
        yield lambda slots: Home(workshop, tmp_path, stack, slots)


def recorded(generator: SpeculativeGenerator, params: SamplingParams, *, prefixes: bool = True) -> Trace:
    """A trace of the drafter of a generator."""
    target, ids = generator.target, PROMPTS[: len(params.seed)]  # type: ignore[arg-type]
    prompts = [Prompt(str(i), "any", tuple(row)) for i, row in enumerate(ids)]
    texts, one = record(generator.drafter, target, prompts, requests=Request.batch(ids, params, generator.limits))
    one = replace(one, name="it", prefixes=one.prefixes and prefixes)
    return Trace("tiny", "0", {}, tuple(target.kv_buckets), target.config.vocab_size, texts, (one,), {})


def real(generator: SpeculativeGenerator, params: SamplingParams) -> tuple[Statistics, list[list[int]]]:
    prompts = PROMPTS[: len(params.seed)]  # type: ignore[arg-type]
    result = generator.sample(prompts, params=params, return_dict=True)
    assert isinstance(result, GenerationResult)
    return result.statistics, [
        row[len(p) : n].tolist() for row, p, n in zip(result.sequences, prompts, result.lengths, strict=True)
    ]


def counts(statistics: Statistics) -> tuple[object, ...]:
    return (
        statistics.tau, statistics.num_rounds, statistics.num_drafts, statistics.num_draft_tokens_per_pos,
        statistics.num_accepted_tokens_per_pos, statistics.new_tokens,
    )  # fmt: skip


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.of != "choice"])
def test_predicted_acceptance_length_equals_a_run(name: str, homes: Homes) -> None:
    """Every row of the registry, in a batch of 4: texts that end inside of a draft, and ones that end with their room.

    Plain decoding is counted step by step: several steps in one graph count those behind the end of a text too.
    """
    depth = 0 if ROWS[name].of == "none" else ROWS[name].depths[-1]
    for slots, params in ((4, PARAMS), *(((1, LONG),) if name in ("model", "EAGLE 3 chain", "ngram") else ())):
        home = homes(slots)
        trace = recorded(ROWS[name].make(home, depth), params)
        statistics, texts = real(ROWS[name].make(home, depth), params)
        assert [list(text.tokens) for text in trace.texts] == texts
        recording = ReplayDrafter(trace, trace.drafters[0])
        anew = ROWS[name].make(home, depth).drafter if name in TEXT_ROWS else recording
        assert counts(replay(trace, anew, batch_size=slots).statistics) == counts(statistics)


@pytest.mark.parametrize("name", ["model", "model, in doubt", "EAGLE 3 chain", "Medusa chain", "function"])
def test_one_recording_answers_smaller_depths(name: str, homes: Homes) -> None:
    home, row = homes(1), ROWS[name]
    trace = recorded(row.make(home, 4), PARAMS)
    for k in (1, 2):
        statistics, _ = real(row.make(home, k), PARAMS)
        answer = ask(trace, Policy(("it",), k))
        assert counts(answer.replayed.statistics) == counts(statistics)


def test_confidence_thresholds_equal_a_run(homes: Homes, tmp_path: Path) -> None:
    """Answers of one recording, single and in a list, whose next drafter has a turn where the model is in doubt."""
    home = homes(2)
    trace = recorded(ROWS["model, in doubt"].make(home, 4), PARAMS)
    (one,) = trace.drafters
    assert one.confidence_threshold == 0.3 and one.confidences is not None
    sure = sorted(value for text in one.confidences for values in text for value in values)
    seen = set()
    for threshold in (0.0, sure[len(sure) // 3], sure[-len(sure) // 4], 1.0):  # one that is met exactly among them
        for draft, names in ((home.draft, ("it",)), ([home.draft, "ngram"], ("it", "ngram"))):
            generator = SpeculativeGenerator(draft, home.target, k=3, confidence_threshold=threshold)
            statistics, _ = real(generator, PARAMS)
            answer = ask(trace, Policy(names, 3, confidence=threshold), batch_size=2)
            assert counts(answer.replayed.statistics) == counts(statistics)
            seen.add(statistics.num_drafts)
    assert len(seen) > 3, "thresholds differ"
    save_trace(tmp_path / "a.trace", trace)
    assert load_trace(tmp_path / "a.trace") == trace
    times = RoundTimes({("none", 0, 1): 1.0, ("it", 4, 1): 1.5, ("it+ngram", 4, 1): 1.5})
    grid = search(trace, times, batch_size=1, max_depth=4)
    speeds = [row.tokens_per_second or 0 for row in grid]
    assert speeds == sorted(speeds, reverse=True) and len(grid) > 8
    for policy, message in (
        (Policy(("suffix",), 2, confidence=0.5), "no threshold"),
        (Policy(("it",), 2, confidence=1.5), "0 to 1"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            drafter_of(trace, policy)


def test_lists_choices_and_subtrees_equal_a_run(homes: Homes) -> None:
    home = homes(1)
    trace = recorded(ROWS["model"].make(home, 4), PARAMS)
    statistics, _ = real(SpeculativeGenerator(["suffix", "ngram", home.draft], home.target, k=4), PARAMS)
    answer = ask(trace, Policy(("suffix", "ngram", "it"), 4))
    assert counts(answer.replayed.statistics) == counts(statistics)
    chosen = DraftSpec("choice", options=(("choose_by", "length"),))
    for slots, k in ((1, 4), (4, 2)):
        home = homes(slots)
        chosen = replace(chosen, parts=parse_draft(["suffix", "ngram", home.draft]))
        statistics, _ = real(SpeculativeGenerator(chosen, home.target, k=k), PARAMS)
        policy = Policy.parse("choice:suffix+ngram+it", k)
        assert counts(ask(trace, policy, batch_size=slots).replayed.statistics) == counts(statistics)
        assert 0 < sum(one.num_drafts for one in statistics.drafters.values()) <= statistics.num_drafts
    tree = recorded(ROWS["EAGLE 3 static tree"].make(home, 3), PARAMS)
    whole, part = (ask(tree, Policy(("it",), None, nodes)).acceptance for nodes in (None, (0, 2, 5)))
    assert part.num_rounds >= whole.num_rounds and max(d.drafted for d in part.drafts) == 3
    for nodes in ((2, 4), (0, 9)):
        with pytest.raises(ConfigurationError, match="nodes: expected a subtree"):
            ask(tree, Policy(("it",), None, nodes))


def test_questions_beyond_the_recording_are_rejected(homes: Homes) -> None:
    trace = recorded(ROWS["retokenize"].make(homes(1), 2), PARAMS, prefixes=False)
    for policy, message in (
        (Policy(("it",), 1), r"k: expected 2, .* not prefixes of longer ones\), got 1"),
        (Policy(("it",), 5), "record it with k=5"),
        (Policy(("other",), 1), "got 'other'"),
        (Policy(("ngram",)), "k: expected the draft length of ngram, got none; give --k 4"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            drafter_of(trace, policy)


def test_a_trace_file_round_trips_and_reports_damage(homes: Homes, tmp_path: Path) -> None:
    trace = recorded(ROWS["EAGLE 2"].make(homes(1), 3), PARAMS)
    path = tmp_path / "a.trace"
    save_trace(path, trace)
    assert load_trace(path) == trace
    whole = path.read_bytes()
    for data, message in (
        (b"something else", "expected a trace"),
        (whole[:-9], "checksum"),
        (whole[:90] + bytes([whole[90] ^ 1]) + whole[91:], "checksum"),
        (gzip.compress(b'{"version": 9}'), "a trace of version 4, got 9"),
        (gzip.compress(b'{"version": 4, "trace": {}}'), "expected a trace, got another file"),
    ):
        path.write_bytes(data)
        with pytest.raises(TraceError, match=message):
            load_trace(path)
    with pytest.raises(TraceError, match="record one with this model"):
        check_target(trace, "1", "other")


def test_predicted_times_and_choices_equal_the_formula(homes: Homes) -> None:
    trace = recorded(ROWS["model"].make(homes(1), 4), PARAMS)
    times = RoundTimes({("it", 1, 1): 1.0, ("it", 3, 1): 2.0, ("it", 1, 2): 1.5, ("it", 3, 2): 2.5}, 0.25)
    answer = ask(trace, Policy(("it",), 2), times=times)
    assert answer.seconds == 1.5 * answer.acceptance.num_rounds + 0.25 * len(trace.texts)
    with pytest.raises(ConfigurationError, match="got 'suffix'"):
        ask(trace, Policy(("suffix",), 2), times=times)
    policies = [Policy(("it",), 2), Policy(("suffix",), 2), Policy(())]
    answers = [ask(trace, policy) for policy in policies]
    chosen, best = best_per_text(answers)
    fewest = [min(answer.replayed.requests[i].num_rounds for answer in answers) for i in range(len(trace.texts))]
    assert best.num_rounds == sum(fewest) and len(chosen) == len(trace.texts)


@pytest.mark.parametrize(("slope", "best"), [(0.01, 4), (3.0, 0)])
def test_an_adaptive_length_follows_its_times(homes: Homes, slope: float, best: int) -> None:
    """The engine's controller, with times that are given: it finds the depth that is the fastest, or rests."""
    long = SamplingParams(sequence_length=128, eos_token_id=[], seed=[1])
    home = homes(1)
    trace = recorded(SpeculativeGenerator(home.target.sibling(), home.target, k=4), long)
    times = RoundTimes({("none", 0, 1): 1.0, ("it", 1, 1): 1.0 + slope, ("it", 4, 1): 1.0 + 4 * slope})
    answer = ask(trace, Policy(("it",), draft_lengths=(0, 1, 4)), times=times)
    lengths = answer.replayed.statistics.draft_lengths
    assert Counter(lengths).most_common(1)[0][0] == best and len(set(lengths)) == 3
    fixed = [ask(trace, Policy(("it",), k), times=times).seconds or 0 for k in (1, 4)]
    fixed.append(ask(trace, Policy(()), times=times).seconds or 0)
    assert min(fixed) <= (answer.seconds or 0) < sorted(fixed)[1]
    with pytest.raises(ConfigurationError, match="--times"):
        ask(trace, Policy(("it",), draft_lengths=(0, 4)))


def test_requests_that_compete_for_rows_take_the_time_that_is_known_by_hand() -> None:
    """Every draft of one request is right, none of the other is. A row takes a second, so three tokens in the 4.25
    seconds of three rows are the best: two in 3 without drafts, three in 5.25 with both.
    """
    rounds, (right, wrong) = 400, ((7, 9), (3, 0))
    texts = [
        TraceText(str(prompt), "", (prompt,), (token,) * count, 0, 1 + count, "length")
        for prompt, (token, count) in enumerate([(right[0], 2 * rounds + 1), (wrong[0], rounds + 1)])
    ]
    drafts = (((right[0],),) * (2 * rounds), ((wrong[1],),) * rounds)
    it = RecordedDrafter("it", "it", 1, None, False, None, True, drafts)
    trace = Trace("table", "0", {}, (1024,), 10, tuple(texts), (it,), {})
    times = RoundTimes({("none", 0, 1): 2.0, ("none", 0, 2): 3.0, ("it", 1, 2): 5.25})
    policy = Policy(("it",), draft_lengths=(0, 1), competes=True)
    answer = ask(trace, policy, batch_size=2, times=times)
    first, second = (one.num_drafts for one in answer.replayed.requests)
    assert first > 0.9 * rounds and second < 0.15 * rounds, "a request that does not profit gets a row seldom, to see"
    assert 0.68 < (answer.tokens_per_second or 0) <= 3 / 4.25
    together = ask(trace, replace(policy, competes=False), batch_size=2, times=times)
    assert (together.tokens_per_second or 0) <= 2 / 3 * 1.02, "one length for both: plain decoding is the best"
    one_size = RoundTimes({("none", 0, 2): 3.0, ("it", 1, 2): 5.25})
    with pytest.raises(ConfigurationError, match="timed only at batch size 2, not 4"):
        ask(trace, policy, batch_size=2, times=one_size)
