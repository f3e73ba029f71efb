"""Token rules and sampling modes of a request are a property of its row: other rows keep theirs, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import cycle

import pytest

from paceline import SpeculativeGenerator
from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Reading
from paceline.core.sampling import Sampling, kind_of, kind_of_params
from paceline.core.types import Commit, PrefillResult, RoundLimits, RoundResult, SamplingKind, SamplingTensors
from paceline.engine.batch import Batch, RoundShape
from paceline.engine.engine import ListQueue
from paceline.engine.request import Request, SamplingParams
from paceline.engine.rounds import Rounds
from paceline.outputs import Statistics
from paceline.text.structured_output import StructuredOutput
from tests.fakes import Checked, TableDecoder, near, table, watch_rounds
from tests.orchestrator.json_tokens import BOS, EOS, SIZE, tokenizer
from tests.orchestrator.test_trees import Orchard

TARGET = table(SIZE, seed=3, spread=2.0)
DRAFT = near(TARGET, seed=4, spread=1.0)
WORDS = tokenizer()
PROMPTS = [[BOS, 5, 9], [BOS], [BOS, 7, 7, 8, 1], [3, 4], [BOS, 2]]
ROWS: list[dict[str, object]] = [
    {},
    {"structured_outputs": StructuredOutput("regex", r"(ab|c){2,6}[0-9]+"), "tokenizer": WORDS},
    {"presence_penalty": 0.9, "frequency_penalty": 0.3, "logit_bias": {4: 2.0}},
    {},
    {"logprobs": 3, "prediction": [5, 9, 2, 2]},
    {"prediction": [1, 2, 3, 4, 5]},
    {"repetition_penalty": 1.3, "min_tokens": 6},
]
MODES: dict[str, tuple[Callable[[int], object], dict[str, object]]] = {
    "plain": (lambda _slots: None, {"k": 4, "exact": False}),
    "ngram": (lambda _slots: "ngram", {"k": 4}),
    "suffix": (lambda _slots: "suffix", {"k": 3}),
    "model": (lambda slots: TableDecoder(DRAFT, slots=slots, eos=(EOS,)), {"k": 3}),
    "model unfused": (lambda slots: TableDecoder(DRAFT, slots=slots, eos=(EOS,)), {"k": 3, "fused": False}),
    "model auto": (lambda slots: TableDecoder(DRAFT, slots=slots, eos=(EOS,)), {"k": "auto"}),
    "list": (lambda slots: ["ngram", TableDecoder(DRAFT, slots=slots, eos=(EOS,))], {"k": 3}),
    "tree": (lambda _slots: Orchard([], grown=False), {}),
    "grown tree": (lambda _slots: Orchard([], grown=True), {}),
}
SETTINGS: list[dict[str, object]] = [{}, {"do_sample": True, "temperature": 1.0}]


def made(mode: str, slots: int, kind: type[SpeculativeGenerator] = Checked) -> SpeculativeGenerator:
    draft, options = MODES[mode]
    return kind(draft(slots), TableDecoder(TARGET, slots=slots, eos=(EOS,)), **options)  # type: ignore[arg-type]


def requests(generator: SpeculativeGenerator, setting: dict[str, object]) -> list[Request]:
    asked = []
    for index, (row, prompt) in enumerate(zip(ROWS, cycle(PROMPTS), strict=False)):
        params = SamplingParams(**{"max_new_tokens": 18 + index, "seed": index, **setting, **row})  # type: ignore[arg-type]
        (request,) = Request.batch([prompt], params, generator.limits)
        asked.append(replace(request, index=index))
    return asked


def served(generator: SpeculativeGenerator, asked: list[Request]) -> dict[int, list[int]]:
    texts: dict[int, list[int]] = {request.index: [] for request in asked}
    with closing(generator.serve(ListQueue(asked))) as outputs:
        for output in outputs:
            assert output.error is None
            texts[output.index] += output.tokens
    return texts


@pytest.mark.parametrize("setting", SETTINGS, ids=["greedy", "drawn"])
def test_every_request_of_a_mixed_batch_equals_plain_decoding_of_it(setting: dict[str, object]) -> None:
    plain = made("plain", 1, SpeculativeGenerator)
    alone: dict[int, list[int]] = {}
    for request in requests(plain, setting):
        alone |= served(plain, [request])
    assert len({tuple(text) for text in alone.values()}) == len(ROWS)
    for number, mode in enumerate(MODES):
        generator = made(mode, 2 + number % 2 * 2)
        assert served(generator, requests(generator, setting)) == alone, mode


def test_a_batch_without_such_requests_never_leaves_its_graphs() -> None:
    generator = made("model", 2)
    plain = [one for one in requests(generator, {}) if not one.on_host and not one.prediction]
    first = served(generator, plain)
    graphs = {key.kind for key, _ in generator.target._made if key.draft is not None}  # type: ignore[attr-defined]
    assert graphs == {"verify"} and not any(key.kind == "window" for key, _ in generator.target._made)  # type: ignore[attr-defined]
    served(generator, requests(generator, {}))
    assert any(key.kind == "window" for key, _ in generator.target._made)  # type: ignore[attr-defined]
    forwards = generator.target.body.forwards  # type: ignore[attr-defined]
    assert served(generator, plain) == first
    assert generator.target.body.forwards > forwards  # type: ignore[attr-defined]


def test_a_row_without_a_possible_token_ends_without_the_others() -> None:
    generator = made("ngram", 2)
    asked = requests(generator, {})[:1]
    never = SamplingParams(logits_processor=[lambda _ids, scores: scores - float("inf")])  # type: ignore[list-item]
    broken = replace(Request.batch([[BOS]], never, generator.limits)[0], index=9)
    with closing(generator.serve(ListQueue([broken, *asked]))) as outputs:
        got = list(outputs)
    (failed,) = [one for one in got if one.index == 9]
    assert (
        failed.finish_reason == "error"
        and "tokens, got none; let it allow one, such as the eos id" in str(failed.error)
        and failed.tokens == ()
    )
    text = [token for one in got if one.index == 0 for token in one.tokens]
    assert text == served(made("plain", 1), requests(made("plain", 1), {})[:1])[0]


def test_a_prediction_is_used_as_draft_counted_and_changes_no_token() -> None:
    for mode in ("plain", "ngram", "model", "tree"):
        generator = made(mode, 1, SpeculativeGenerator)
        asked = {"max_new_tokens": 40, "do_sample": True, "seed": 11, "eos_token_id": []}
        text = generator.sample([[BOS, 1]], **asked)[0].tolist()  # type: ignore[call-overload]
        changed = [*text[2:12], 0, 0, *text[14:]]  # what was expected is what comes, but for two tokens
        before = generator.statistics.num_rounds
        with closing(generator.stream([[BOS, 1]], prediction=changed, **asked)) as outputs:  # type: ignore[arg-type]
            got = list(outputs)
        assert [token for one in got for token in one.tokens] == text[2:], mode
        accepted = sum(one.accepted_prediction_tokens for one in got)
        assert accepted >= 20 and sum(one.rejected_prediction_tokens for one in got) > 0, (mode, accepted)
        assert generator.statistics.num_rounds < before, mode
        assert accepted <= generator.statistics.num_accepted_tokens


def test_an_unusable_prediction_is_rejected() -> None:
    for draft, options, said in (
        (None, {}, "prediction: expected a draft, .*, got None"),
        (None, {"k": 0, "exact": False}, "prediction: expected k of at least 1, got 0"),
        ("ngram", {"acceptor": "reject"}, "prediction: expected acceptor='match', .*, got 'reject'"),
    ):
        generator = SpeculativeGenerator(draft, TableDecoder(TARGET), **options)
        with pytest.raises(ConfigurationError, match=said):
            generator.sample([[BOS]], prediction=[1, 2, 3])


class Kinds:
    """Notes the kind of every prompt and round, each of which is what its parameters ask for."""

    def __init__(self, inner: Rounds, prompts: list[SamplingKind], rounds: list[SamplingKind]) -> None:
        self._inner, self._prompts, self._rounds = inner, prompts, rounds

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def start(self, slot: int, prompt: list[int], sampling: SamplingTensors) -> Reading:
        self._prompts.append(sampling.kind)
        return self._inner.start(slot, prompt, sampling)

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> RoundResult:
        assert sampling.kind == kind_of_params(sampling.params)
        self._rounds.append(sampling.kind)
        return self._inner(commit, sampling, limits)


def kinds_generator(slots: int, k: int) -> SpeculativeGenerator:
    return Checked(TableDecoder(DRAFT, slots=slots), TableDecoder(TARGET, slots=slots), k=k)


def request(index: int, sampling: Sampling, *, new: int = 20) -> Request:
    prompt = (index + 1, 5, index + 2)
    return Request(index, prompt, sampling, len(prompt) + new)


GREEDY, TOP_K = Sampling(), Sampling(temperature=1.2, top_k=5, seed=3)
FULL, WIDE = Sampling(temperature=0.8, top_p=0.9, seed=4), Sampling(temperature=1.5, top_k=300, seed=5)


def test_a_batch_has_the_widest_sampling_mode_of_its_requests() -> None:
    batch = Batch([None] * 3, RoundShape(2, 3), Statistics())
    params, seen = batch.sampling.params, [batch.sampling.kind]
    for slot, sampling in enumerate((GREEDY, WIDE, TOP_K)):
        batch.seat(slot, request(slot, sampling))
        assert batch.sampling.kind == seen[-1], "its prompt is not read yet"
        batch.join(slot, PrefillResult(1))
        seen.append(batch.sampling.kind)
    for index in (1, 2, 0):
        batch.abort([index])
        seen.append(batch.sampling.kind)
    assert seen == ["greedy", "greedy", "wide", "wide", "top-k", "greedy", "greedy"]
    assert batch.sampling.params is params, "rounds see the same tensors"


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("sampled", [TOP_K, FULL, WIDE], ids=["top-k", "full", "wide"])
def test_rounds_use_the_widest_mode_while_its_request_runs(sampled: Sampling, k: int) -> None:
    made, prompts, rounds = kinds_generator(2, k), list[SamplingKind](), list[SamplingKind]()
    watch_rounds(made, lambda inner: Kinds(inner, prompts, rounds))
    served(made, [request(0, GREEDY, new=40), request(1, sampled, new=12)])
    kind = kind_of(sampled.temperature, sampled.top_k)
    assert prompts == ["greedy", kind]
    assert rounds == [kind] * rounds.count(kind) + ["greedy"] * rounds.count("greedy")
    assert set(rounds) == {kind, "greedy"}


@pytest.mark.parametrize("k", [0, 3])
def test_every_row_of_a_mixed_batch_keeps_its_tokens(k: int) -> None:
    kinds = [GREEDY, FULL, TOP_K, WIDE, GREEDY, TOP_K]
    asked = [request(index, sampling, new=12 + 5 * index) for index, sampling in enumerate(kinds)]
    alone = [served(kinds_generator(1, k), [one])[one.index] for one in asked]
    assert [len(text) for text in alone] == [12 + 5 * index for index in range(len(asked))]
    for slots in (2, 3):
        assert served(kinds_generator(slots, k), asked) == dict(enumerate(alone))
