"""The contract of every drafter, over the rows of `tests.contract.drafters`.

That no token changes: `tests/equality/test_matrix.py`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from paceline import DRAFT_LENGTHS, GenerationResult, SpeculativeGenerator
from paceline.auto import Sampler
from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter, TraceableDrafter
from paceline.decoder.backends.base import Step
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.prefix_cache import PrefixCache
from paceline.draft.choice import FallbackDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.registry import ACCEPTANCE_RULES, DRAFTERS, resolve
from tests import sampled
from tests.contract.drafters import ROWS, Depth, Home, Row
from tests.decoder.tiny import Workshop
from tests.draft.tokenizers_of_two import CORPUS, bytes_merged
from tests.fakes import AnyLength, rebuild
from tests.sampled import texts

Asked = dict[str, Any]
Make = Callable[..., tuple[SpeculativeGenerator, Sampler]]

NEW = 8
PROMPTS = [
    [5, 9, 5, 9, 5],
    [17],
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3],
    bytes_merged(80).encode(CORPUS[1]),
]
"""Ragged: one of a single token, one longer than the prefill graph, one that is text."""

SETTINGS: dict[str, Asked] = {
    "greedy": {},
    "cool": {"do_sample": True, "temperature": 0.7, "top_k": 20, "seed": 11},
    "hot": {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "seed": 11},
}
COOL = SETTINGS["cool"]


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest) -> Row:
    return ROWS[request.param]


@pytest.fixture
def make(workshop: Workshop, tmp_path: Path, row: Row) -> Iterator[Make]:
    """The row's generator for a depth, and its target."""
    with ExitStack() as stack:

        def made(k: Depth | None = None, *, slots: int = 4, **options: Any) -> tuple[SpeculativeGenerator, Sampler]:
            load = {"backend": options.pop("backend")} if "backend" in options else {}
            home = Home(workshop, tmp_path, stack, slots, load, options)
            return row.make(home, row.depths[-1] if k is None else k), home.target

        yield made


_KNOWN: dict[str, list[list[int]]] = {}


def plain(target: Sampler, prompts: list[list[int]], asked: Asked) -> list[list[int]]:
    """Plain decoding; the same for every row, so it is computed once."""
    key = repr((prompts, asked))
    if key not in _KNOWN:
        _KNOWN[key] = texts(run(target, prompts, asked))
    return _KNOWN[key]


def run(sampler: Sampler, prompts: list[list[int]], asked: Asked) -> GenerationResult:
    return sampled.run(sampler, prompts, **{"max_new_tokens": NEW, **asked})


def watch(monkeypatch: pytest.MonkeyPatch, wrap: Callable[[CompiledDecoder, GraphKey, Step], Step]) -> None:
    """Put something around every graph of a decoder."""
    graph = CompiledDecoder.graph
    monkeypatch.setattr(
        CompiledDecoder, "graph", lambda self, key, *rest, **more: wrap(self, key, graph(self, key, *rest, **more))
    )


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_registered_drafter_matches_its_row(name: str, workshop: Workshop, tmp_path: Path) -> None:
    rows = [row for row in ROWS.values() if row.of == name]
    assert rows, (
        f"no row of the contract suite makes the drafter {name!r}: add Row({name!r}, make) to ROWS in "
        "tests/contract/drafters.py, where make(home, k) returns a generator that drafts with it"
    )
    registered = DRAFTERS[name]
    maker = resolve(registered.path)
    shapes = []
    with ExitStack() as stack:
        for row in rows:
            drafter = row.make(Home(workshop, tmp_path, stack, 1), row.depths[-1]).drafter
            assert isinstance(drafter, getattr(maker, "__self__", maker))
            assert isinstance(drafter, TraceableDrafter) == registered.fused
            assert (type(drafter).propose_allowed is not Drafter.propose_allowed) == registered.masks
            shapes.append(drafter.draft_shape)
            if registered.listable and registered.given_as != "list" and drafter.draft_shape.is_chain:
                assert FallbackDrafter([NgramDrafter(2), drafter]).draft_shape.is_chain
    assert any(not shape.is_chain for shape in shapes) == registered.trees


@pytest.mark.parametrize("name", ACCEPTANCE_RULES)
def test_a_registered_rule_matches_its_row(name: str) -> None:
    registered = ACCEPTANCE_RULES[name]
    rule = resolve(registered.path)
    for field in ("name", "needs", "draft_probs", "lossless", "trees", "on_host"):
        assert getattr(rule, field) == getattr(registered, field), field
    assert bool(registered.warning) != registered.lossless


@pytest.mark.parametrize("row", [name for name, row in ROWS.items() if DRAFTERS[row.of].fused], indirect=True)
def test_fused_and_separate_graphs_draft_the_same(make: Make) -> None:
    """With one request and with four; that the tokens are those of plain decoding is in the matrix too."""
    found = list[object]()
    for fused in (True, False):
        generator, target = make(fused=fused, backend="native")
        for asked in SETTINGS.values():
            for prompts in (PROMPTS[:1], PROMPTS):
                made, wanted = (run(one, prompts, {**asked, "max_new_tokens": 20}) for one in (generator, target))
                assert texts(made) == texts(wanted)
                found.append(made.statistics.num_accepted_tokens_per_pos)
    assert found[:6] == found[6:]


@pytest.mark.parametrize(
    "row", [name for name, row in ROWS.items() if row.of in ("dflash", "eagle", "medusa", "mtp")], indirect=True
)
def test_a_round_is_one_graph(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the commit, drafting, the target's pass, acceptance and compaction are one call in each round."""
    calls = list[GraphKey]()
    watch(monkeypatch, lambda _, key, step: lambda *inputs: (calls.append(key), step(*inputs))[1])
    result = run(make(slots=1, fused=True)[0], PROMPTS[:1], {"max_new_tokens": 20})
    rounds = [key for key in calls if key.is_round]
    assert len(rounds) == result.statistics.num_rounds > 3
    assert len({key for key in rounds if key.draft is not None}) == 1
    assert sum(key.draft is None for key in rounds) <= 1, "nothing is drafted behind the last token"
    assert all(key.is_prompt or key.kind == "read" for key in calls if key not in rounds)


def test_slots_without_a_request_change_no_token(make: Make) -> None:
    generator, target = make()
    wanted = plain(target, PROMPTS, COOL)[0]
    assert texts(run(generator, PROMPTS[:1], COOL)) == [wanted]


def test_several_outputs_of_a_prompt_prefill_it_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, target = make()
    reads, asked = [], {**COOL, "n": 3}

    def counted(decoder: CompiledDecoder, key: GraphKey, step: Step) -> Step:
        def read(tokens: Tensor, row: Tensor, *others: Tensor) -> list[Tensor]:
            reads.extend([decoder.body] if row == 0 else [])  # behind row 0, a drafter reads what it has missed
            return step(tokens, row, *others)

        return read if key.kind == "prefill" else step

    watch(monkeypatch, counted)
    found = texts(run(generator, PROMPTS[:1], asked))
    assert reads and len(reads) == len(set(map(id, reads))), "once by every model"
    monkeypatch.setattr(PrefixCache, "find", lambda *_: None)
    reads.clear()
    assert found == texts(run(target, PROMPTS[:1], asked)) and len(set(map(str, found))) == 3
    assert len(reads) == 3


def test_reused_slots_keep_nothing_of_earlier_requests(make: Make) -> None:
    """More requests than slots, of all lengths; a stream that is dropped in the middle; then the same again."""
    generator, target = make()
    dice = random.Random(3)
    prompts = [[dice.randrange(96) for _ in range(dice.randrange(1, 9))] for _ in range(7)]
    asked = {**COOL, "eos_token_id": [7, 30, 31, 40, 50]}
    before = kept(generator.drafter)
    wanted = plain(target, prompts, asked)
    for _ in range(2):
        events = generator.stream(prompts, max_new_tokens=NEW, **asked)
        next(events)
        events.close()  # type: ignore[attr-defined]
        assert texts(run(generator, prompts, asked)) == wanted
        assert kept(generator.drafter) == before


def kept(part: object) -> int:
    """Entries in everything a drafter keeps for its requests; a corpus is kept on purpose and belongs to no request."""
    found = 0
    for value in vars(part).values():
        if isinstance(value, dict | list | set) and not isinstance(value, Counter) and not isinstance(part, nn.Module):
            found += len(value)
        members = value if isinstance(value, tuple) else (value,)
        found += sum(kept(one) for one in members if isinstance(one, Drafter) and hasattr(one, "__dict__"))
    return found


def test_draft_length_may_change_in_every_round(make: Make, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """At random, off and on again: no gap is left and no token changes. What has one depth says so."""
    monkeypatch.setattr("paceline.build.DraftLengthController", AnyLength)
    if not row.adaptive_k:
        if row.drafts:
            with pytest.raises(ConfigurationError, match=r"k: expected one number, since .*(depth|draft length)"):
                run(make((0, 1, row.depths[-1]))[0], PROMPTS, {})
        return
    generator, target = make(DRAFT_LENGTHS)
    for setting, exact in ((SETTINGS["greedy"], True), (SETTINGS["hot"], True), (SETTINGS["hot"], False)):
        rebuild(generator, exact=exact)  # else every length has commits of its own width
        long = {**setting, "max_new_tokens": 20}
        assert texts(run(generator, PROMPTS, long)) == plain(target, PROMPTS, long)
        assert len(set(generator.statistics.draft_lengths)) > 2
