"""Whatever is combined, speculation gives the tokens of plain decoding: random configurations over table models.

    pytest tests/contract/test_random.py --hypothesis-profile=thorough      2,000 of them

Decoders are shared, so that each configuration finds caches that others have left, and one costs milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from paceline import FunctionDrafter, SpeculativeGenerator, TokenizerPair
from paceline.auto import Sampler
from paceline.decoder.decoder import CompiledDecoder
from paceline.draft.model import ModelDrafter
from paceline.draft.suffix import SuffixDrafter
from paceline.draft.vocab_map import IntersectionVocabMap
from tests import sampled
from tests.draft.tokenizers_of_two import bytes_merged
from tests.fakes import AnyLength, TableDecoder, near, rebuild, table

V = 9
TARGET = table(V, seed=0, spread=1.5)
TOKENIZERS = TokenizerPair(target=bytes_merged(V, corpus=["ab cab"]), draft=bytes_merged(V - 2, corpus=["abc ab"]))
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6], [7, 8, 7, 8, 7, 8, 7, 8, 7], [3, 3], [8, 1, 8, 1]]
HEATS: list[dict[str, object]] = [
    {},
    {"do_sample": True, "temperature": 0.7},
    {"do_sample": True, "temperature": 1.0},
    {"do_sample": True, "temperature": 1.0, "top_k": 3},
    {"do_sample": True, "temperature": 0.7, "top_p": 0.8},
]
DRAFTERS = (
    "none", "ngram", "suffix", "function", "corpus", "model", "intersection", "retokenize", "ngram, model",
    "suffix, retokenize", "model, function",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One configuration. ``k``: a depth or a list of lengths; ``dice``: the draft lengths are chosen at random."""

    drafter: str
    k: int | tuple[int, ...]
    dice: bool
    slots: int
    buckets: tuple[int, ...]
    fused: bool | None
    exact: bool
    confidence: float


CASES = st.builds(
    Case,
    drafter=st.sampled_from(DRAFTERS),
    k=st.one_of(
        st.integers(1, 6), st.sets(st.integers(0, 7), min_size=2, max_size=4).map(lambda found: tuple(sorted(found)))
    ),
    dice=st.booleans(),
    slots=st.integers(1, 3),
    buckets=st.sampled_from([(32,), (16, 32)]),
    fused=st.sampled_from([None, False]),
    exact=st.booleans(),
    confidence=st.sampled_from([0.0, 0.0, 0.4]),
)
CALLS = st.fixed_dictionaries(
    {
        "max_new_tokens": st.sampled_from([1, 2, 5, 10]),
        "eos_token_id": st.sampled_from([[], [3], [3, 7]]),
        "stop_strings": st.sampled_from([None, None, "ab", [" c", "b "]]),
        "pad_token_id": st.just(0),
    }
)


@cache
def decoder(role: str, slots: int, buckets: tuple[int, ...]) -> TableDecoder:
    size = V - 2 if role == "other" else V
    logits = TARGET if role == "target" else near(TARGET, seed=1, spread=0.6)[:size, :size, :size].contiguous()
    return TableDecoder(logits, slots=slots, kv_buckets=buckets)


def again(text: list[int]) -> list[int]:
    """Right now and then, and sometimes no token at all."""
    at = next((i for i in range(len(text) - 2, -1, -1) if text[i] == text[-1]), None)
    return [text[-1], V + 3] if at is None else text[at + 1 :]


def source(name: str, case: Case) -> object:
    depth = case.k if isinstance(case.k, int) else case.k[-1]
    if name == "corpus":
        return SuffixDrafter(depth, min_match=1, max_cached_tokens=40)
    if name == "function":
        return FunctionDrafter(again, depth)
    if name == "intersection":
        words, names = {str(i): i for i in range(V)}, {str(i): V - 1 - i for i in range(0, V, 2)}
        vocabulary = IntersectionVocabMap(words, names, sizes=(V, V))
        return ModelDrafter(decoder("draft", case.slots, case.buckets), depth, vocabulary=vocabulary)
    if name in ("model", "retokenize"):
        return decoder("draft" if name == "model" else "other", case.slots, case.buckets)
    return name


def made(case: Case) -> SpeculativeGenerator:
    names = case.drafter.split(", ")
    sources = [source(name, case) for name in names]
    maker = SpeculativeGenerator(
        sources if len(sources) > 1 else sources[0],  # type: ignore[arg-type]
        decoder("target", case.slots, case.buckets),
        k=case.k,
        fused=case.fused,
        exact=case.exact,
        confidence_threshold=case.confidence if any(isinstance(one, CompiledDecoder) for one in sources) else 0.0,
        vocabulary=TOKENIZERS if "retokenize" in names else "same",
    )
    if case.dice and not isinstance(case.k, int):
        rebuild(maker, controller=AnyLength(case.k))
    return maker


def run(sampler: Sampler, prompts: list[list[int]], **asked: object) -> tuple[list[list[int]], list[str]]:
    done = sampled.run(sampler, prompts, tokenizer=TOKENIZERS.target, **asked)
    return sampled.texts(done), list(done.finish_reasons)


PLAIN: dict[str, tuple[list[int], str]] = {}


def plain(prompt: list[int], seed: int, asked: dict[str, object]) -> tuple[list[int], str]:
    """One text at batch size 1, which is the same in any batch."""
    key = repr((prompt, seed, sorted(asked.items(), key=lambda item: item[0])))
    if key not in PLAIN:
        rows, reasons = run(decoder("target", 1, (32,)), [prompt], **{**asked, "seed": seed})
        PLAIN[key] = rows[0], reasons[0]
    return PLAIN[key]


@given(
    case=CASES,
    call=CALLS,
    heat=st.sampled_from(HEATS),
    chosen=st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=4),
    opted=st.sampled_from([True, True, False, None]),
)
def test_any_configuration_gives_the_tokens_of_plain_decoding(
    case: Case, call: dict, heat: dict, chosen: list[int], opted: bool | None
) -> None:
    asked = {**call, **heat}
    prompts = [PROMPTS[index] for index in chosen]
    use_speculation = opted if opted is not None else [index % 2 == 0 for index in range(len(prompts))]
    seeds = [place % 2 for place in range(len(prompts))]
    rows, reasons = run(made(case), prompts, **{**asked, "use_speculation": use_speculation, "seed": seeds})
    wanted = [plain(prompt, seed, asked) for prompt, seed in zip(prompts, seeds, strict=True)]
    assert list(zip(rows, reasons, strict=True)) == wanted
