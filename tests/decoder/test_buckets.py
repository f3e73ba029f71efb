"""Buckets of the cache length: no window crosses a border, and every bucket has its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from paceline import SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.errors import ContextError
from paceline.decoder.backends.base import Step
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.kernels.protocol import CachePosition, Tree
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.draft.model import ModelDrafter
from paceline.draft.vocab_map import VocabMap
from tests.decoder.tiny import VOCABULARY, Workshop, load
from tests.equality.settings import SETTINGS, plain, run, texts


class Guard:
    """Stands in a decoder's place for ``graph`` and checks that no accepted draft lies past the border of its graph."""

    def __init__(self, decoder: SamplingDecoder) -> None:
        self._graph, self.kv_buckets = decoder.graph, set[int]()

    def __call__(self, key: GraphKey, make: type[nn.Module], example: Sequence[Tensor], **whose: object) -> Step:
        step = self._graph(key, make, example, **whose)
        if key.kind != "verify":  # with a draft in the same graph or without
            return step

        def run(*inputs: Tensor) -> list[Tensor]:
            _tokens, count, start, limit = inputs[:4]
            root = start + count - 1
            assert bool((root + limit < key.bucket).all()), f"rows {(root + limit).tolist()} in a graph of {key.bucket}"
            self.kv_buckets.add(key.bucket)
            return step(*inputs)

        return run


def test_no_window_crosses_the_border_of_a_bucket(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    k, setting = 8, "hot and cut"
    options = {"batch_size": 2, "context_length_estimate": 8}
    single = plain(load(workshop.checkpoint(), n_positions=[64], **options), SETTINGS[setting], new=100)
    assert {len(text) for text in single} == {64}
    draft, target = (
        load(workshop.checkpoint(role), n_positions=[16, 32, 64], **options) for role in ("draft", "target")
    )
    assert plain(target, SETTINGS[setting], new=100) == single
    guard = Guard(target)
    monkeypatch.setattr(target, "graph", guard)
    for source in (draft, "ngram"):
        result = run(SpeculativeGenerator(source, target, k=k), SETTINGS[setting], new=100)
        assert texts(result) == single
        assert result.statistics.num_accepted_tokens > 0
    assert guard.kv_buckets == {16, 32, 64}


def test_texts_that_start_at_every_border_are_right(workshop: Workshop) -> None:
    """Rows of unequal length, more than slots, each to its last position or over a border; with a draft and without."""
    judge = LlamaForCausalLM.from_pretrained(workshop.checkpoint(), dtype=torch.float32)
    target = load(workshop.checkpoint(), n_positions=[16, 32, 64], context_length_estimate=[8, 16], batch_size=4)
    text = torch.randint(VOCABULARY, (64,), generator=torch.Generator().manual_seed(2)).tolist()
    prompts = [text[: edge + by] for edge in (8, 16, 24, 32, 48, 64) for by in (-1, 0, 1) if edge + by < 64]
    plain = run(target, {}, prompts=prompts, new=6)
    assert texts(run(SpeculativeGenerator("ngram", target, k=4), {}, prompts=prompts, new=6)) == texts(plain)
    for prompt, made in zip(prompts, texts(plain), strict=True):
        assert len(made) == min(len(prompt) + 6, 64)
        with torch.no_grad():
            exact = judge(torch.tensor([made[:-1]])).logits[0, len(prompt) - 1 :]
        assert made[len(prompt) :] == exact.argmax(-1).tolist()
    with pytest.raises(ContextError):
        target.sample([text], max_new_tokens=1)


@pytest.mark.parametrize(("k", "exact", "fused"), [(3, True, None), ((0, 1, 3), True, False), ((0, 1, 3), False, None)])
def test_compile_makes_the_graphs_of_every_bucket(
    workshop: Workshop, k: int | tuple[int, ...], exact: bool, fused: bool | None
) -> None:
    """A prompt of each length, and texts up to the last position, at any temperature: no graph is made any more."""
    draft, target = (
        load(workshop.checkpoint(role), n_positions=[16, 32, 64], context_length_estimate=[4, 8])
        for role in ("draft", "target")
    )
    generator = SpeculativeGenerator(draft, target, k=k, exact=exact, fused=fused)
    generator.compile()
    made = [dict(decoder._steps) for decoder in (draft, target)]
    for length, setting in zip((1, 5, 14, 15, 30, 63), cycle(SETTINGS.values()), strict=False):
        generator.sample([[3] * length], max_new_tokens=64 - length, eos_token_id=[], **setting)
    assert [decoder._steps for decoder in (draft, target)] == made


def test_skipped_commits_are_read_in_small_graphs_from_any_row(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is not called while suffixes propose; then it reads a few tokens, for which 64 rows would be many."""
    options = {"n_positions": [32, 64, 128], "context_length_estimate": 64}
    draft, target = (load(workshop.checkpoint(role), **options) for role in ("draft", "target"))
    prompts = [[3, 4, 5, 3, 4, 5, 3, 4], [7] * 30, list(range(20, 60))]
    single = [target.sample([prompt], max_new_tokens=60).tolist() for prompt in prompts]
    maker = SpeculativeGenerator(["suffix", (draft, 2)], target, k=6)
    maker.compile()
    made, asked, graph = dict(draft._steps), list[GraphKey](), draft.graph

    def counted(key: GraphKey, *rest: object, **whose: object) -> Step:
        asked.append(key)
        return graph(key, *rest, **whose)  # type: ignore[arg-type]

    monkeypatch.setattr(draft, "graph", counted)
    assert [maker.sample([prompt], max_new_tokens=60).tolist() for prompt in prompts] == single
    caught_up = [key.rows for key in asked if key.is_prompt]
    assert caught_up.count(16) > len(prompts) and caught_up.count(64) == 2, caught_up
    reader = ModelDrafter(draft, 2, vocabulary=VocabMap(96, 96))
    for start in range(128):
        for count in (1, 16, 17, 64, 70):
            if start + count <= 128:
                reader.read(0, [3] * count, start=start)
    assert draft._steps == made


@pytest.mark.parametrize("parents", [None, [-1, 0, 0, 1, 2]], ids=["chain", "tree"])
@pytest.mark.parametrize("width", [8, 32])
def test_on_eager_a_row_has_the_same_bits_in_every_bucket(width: int, parents: list[int] | None) -> None:
    """A longer neighbour moves a text to a wider bucket, and must not move a bit of it."""
    dice, lines, window, groups, rows = torch.Generator().manual_seed(0), 2, 5, 2, 1200
    q = torch.randn(lines, window, 2 * groups, width, generator=dice)
    k, v = (torch.randn(lines, window, groups, width, generator=dice) for _ in range(2))
    cache = [torch.randn(lines, groups, rows, width, generator=dice) for _ in range(2)]
    row, count, slots = (torch.tensor(x, dtype=torch.int32) for x in ([100, 3], [window, window], [1, 0]))
    shape = None if parents is None else Tree.of(torch.tensor([parents] * lines, dtype=torch.int32))

    def attended(reach: int) -> Tensor:
        own = (cache[0].clone(), cache[1].clone())
        return TorchKernels().attend((q, k, v), own, CachePosition(row, count, slots, reach, tree=shape))

    near = attended(105)
    assert all(torch.equal(attended(reach), near) for reach in (128, 200, 256, 300, 512, 1000))
