"""The head that decodes and the network that learns, against plain references; drafts against recomputed paths."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline import SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import Commit, RoundLimits
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.eagle.checkpoint import Checkpoint
from paceline.eagle.config import EagleConfig
from paceline.eagle.drafter import EagleDrafter
from paceline.eagle.head import EagleHead
from paceline.eagle.network import TrainableHead
from paceline.eagle.tree import Chain, DraftTree, DynamicTree, StaticTree, best, kept
from tests.decoder.tiny import Workshop, fresh
from tests.eagle.heads import NEWER, PARALLEL, SHARED, Plain, config, drafter, features, random_head

TEXT = [5, 17, 17, 90, 3, 44, 0, 8, 61]
VARIANTS: list[tuple[int, dict[str, object]]] = [
    (1, {}), (1, {"fc_bias": True, "attention_bias": True, "mlp_bias": True}), (1, {"input_norm": True}), (3, {}),
    (3, {"norm_before_residual": True}), (3, NEWER), (3, {**SHARED, "norm_before_fc": True}), (3, PARALLEL),
]  # fmt: skip
HEADS: list[tuple[int, dict[str, object]]] = [(1, {}), (3, {}), (3, NEWER), (3, SHARED)]
CHAIN, BRANCHES = (-1, 0, 1, 2), (-1, -1, 0, 0, 1, 2, 2, 5)
GROWTHS = [Chain(4), StaticTree(BRANCHES), DynamicTree(9, depth=3, width=3)]


def plain(made: EagleDrafter) -> Plain:
    model = made.decoder.body.model
    return Plain(random_head(made.head.config), model.embedding, model.head)


def trainable(found: Checkpoint[EagleConfig], target: SamplingDecoder) -> TrainableHead:
    model = target.body.model
    network = TrainableHead(found.config, model.embedding.detach(), model.head.detach())
    network.load_state_dict({name: x for name, x in found.weights.items() if name != "ids"})
    return network


@pytest.mark.parametrize(("version", "changes"), VARIANTS)
def test_head_and_network_equal_a_plain_forward(workshop: Workshop, version: int, changes: dict[str, object]) -> None:
    target = workshop.decoder(slots=1)
    found = random_head(config(target.config, version, **changes))
    reference = Plain(found, target.body.model.embedding, target.body.model.head)
    real = torch.randn(len(TEXT), found.config.feature_size)
    wanted = torch.stack([reference.hidden(real[: i + 1], TEXT[: i + 1]) for i in range(len(TEXT))])

    weights = {name: x.clone() for name, x in found.weights.items()}
    if found.config.mask_token is not None:
        del weights["mask_hidden"]
    made = EagleHead(found.config, weights, shared=target.body.shared, kernels=TorchKernels(), options=target.options)
    tokens, row = torch.tensor([TEXT], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    places = torch.arange(len(TEXT), dtype=torch.int32)[None]
    attend = partial(made.attend, place=made.place(row, len(TEXT), target.n_positions))
    hidden = made.run(tokens, made.network.fuse(real[None]), attend, positions=places)
    torch.testing.assert_close(hidden[0], wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made.scores(hidden)[0, -1], reference.scores(wanted[-1]), rtol=1e-4, atol=1e-3)

    network = trainable(found, target)
    with torch.no_grad():
        learned = network(tokens.long(), network.fuse(real[None]), [])
        torch.testing.assert_close(learned[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("version", "changes"), [*HEADS, (3, PARALLEL)])
def test_later_passes_read_the_inputs_of_a_chain(workshop: Workshop, version: int, changes: dict[str, object]) -> None:
    """Pass j at place i is j drafts after the pair i, whose features are real (the training-time test)."""
    target = workshop.decoder(slots=1)
    found = random_head(config(target.config, version, **changes))
    reference = Plain(found, target.body.model.embedding, target.body.model.head)
    network = trainable(found, target)
    real, past = torch.randn(1, len(TEXT), found.config.feature_size), []
    with torch.no_grad():
        hidden = network.fuse(real)
        for ahead in range(4):
            tokens = torch.tensor([TEXT]).roll(-ahead, 1)
            if ahead and found.config.mask_token is not None:
                tokens, hidden = network.unknown(tokens)
            hidden = network(tokens, hidden, past)
            for place in range(len(TEXT) - ahead):
                wanted = reference.hidden(real[0, : place + 1], TEXT[: place + ahead + 1])
                torch.testing.assert_close(hidden[0, place], wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("draft_tree", [Chain(4), StaticTree((-1, -1, 0, 2)), DynamicTree(5, depth=3, width=2)])
def test_reading_the_commit_gives_the_first_level(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, draft_tree: DraftTree
) -> None:
    """Rule C39: a proposal of D levels takes D passes of the head; reading what was committed is the first of them."""
    target = workshop.decoder(slots=1)
    made = drafter(tmp_path, target, version, draft_tree)
    real, seen = features(target, TEXT, made), []
    run = made.head.run
    monkeypatch.setattr(made.head, "run", lambda *given, **named: (seen.append(given), run(*given, **named))[1])
    proposed(made, real)
    reading = -(-(len(TEXT) - 1) // target.options.chunks[-1])  # of the prompt, before anything is proposed
    assert len(seen) - reading == draft_tree.draft_shape.depth > 2


@pytest.mark.parametrize(
    ("version", "changes", "parents"),
    [(*head, parents) for head in (*HEADS, (3, PARALLEL)) for parents in (CHAIN, BRANCHES)]
    + [(3, {"draft_vocab_size": 1}, CHAIN)],
)
def test_chains_and_static_trees_equal_recomputation_of_the_path(
    workshop: Workshop, tmp_path: Path, version: int, changes: dict[str, object], parents: tuple[int, ...]
) -> None:
    target, draft_tree = workshop.decoder(slots=1), Chain(4) if parents == CHAIN else StaticTree(parents)
    made = drafter(tmp_path, target, version, draft_tree, **changes)
    reference, real = plain(made), features(target, TEXT, made)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        above = [] if parent < 0 else paths[parent]
        rank = parents[:node].count(parent)
        best = reference.scores(reference.hidden(real, [*TEXT[1:], 7, *above])).argsort(descending=True)
        paths.append([*above, int(reference.ids[best[rank]])])
    assert proposed(made, real)[0][0].tolist() == [path[-1] for path in paths]


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize(("nodes", "depth", "width"), [(9, 3, 3), (5, 5, 1), (14, 4, 2), (3, 1, 3)])
def test_dynamic_trees_equal_a_list_based_reference(
    workshop: Workshop, tmp_path: Path, version: int, nodes: int, depth: int, width: int
) -> None:
    target = workshop.decoder(slots=1)
    made = drafter(tmp_path, target, version, DynamicTree(nodes, depth=depth, width=width))
    reference, real = plain(made), features(target, TEXT, made)

    def children(path: tuple[int, ...], logprob: float) -> list[tuple[float, tuple[int, ...]]]:
        distributions = reference.scores(reference.hidden(real, [*TEXT[1:], 7, *path])).log_softmax(0)
        values, picks = distributions.sort(descending=True)
        pairs = zip(values[:width].tolist(), picks[:width].tolist(), strict=True)
        return [(logprob + value, (*path, int(reference.ids[pick]))) for value, pick in pairs]

    level = children((), 0.0)
    every = list(level)
    for _ in range(depth - 1):
        level = sorted(level, reverse=True)[:width]
        level = [child for logprob, path in level for child in children(path, logprob)]
        every += level
    wanted = {path for _, path in sorted(every, reverse=True)[:nodes]}
    tokens, parents = proposed(made, real)
    assert parents is not None
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens[0].tolist(), parents[0].tolist(), strict=True):
        assert -1 <= parent < len(paths)
        paths.append(((*paths[parent],) if parent >= 0 else ()) + (token,))
    assert set(paths) == wanted and len(paths) == nodes


@pytest.mark.parametrize(
    ("version", "changes", "draft_tree"),
    [(version, {}, draft_tree) for version in (1, 3) for draft_tree in GROWTHS]
    + [(3, NEWER, Chain(4)), (3, SHARED, GROWTHS[2]), (3, PARALLEL, Chain(4))],
)
def test_after_rounds_the_cache_equals_that_of_one_pass(
    workshop: Workshop, tmp_path: Path, version: int, changes: dict[str, object], draft_tree: DraftTree
) -> None:
    """Drafting reads guesses; committed rows must hold real features only (C38), whatever was accepted."""
    target = fresh(workshop.checkpoint(), batch_size=[4])  # one graph of all slots: no request moves to another one
    made = drafter(tmp_path, target, version, draft_tree, **changes)
    prompts = [TEXT, [4], [33, 2, 9], TEXT[3:]]
    idle = 16  # a slot that is done goes on computing at its first rows
    texts = SpeculativeGenerator(made, target).sample(prompts, max_new_tokens=50, eos_token_id=[]).tolist()
    caches = [cache for pair in made.head.caches() for cache in pair]
    kept = [cache.clone() for cache in caches]
    for slot, prompt in enumerate(prompts):
        text = texts[slot][: len(prompt) + 50]
        made.add_request(slot, text[:-1], features(target, text[:-1], made))
        # The last round's own commit is read by the round that follows, which did not come.
        sure = len(text) - 2 - draft_tree.draft_shape.depth - 1
        for before, after in zip(kept, caches, strict=True):
            torch.testing.assert_close(before[slot, :, idle:sure], after[slot, :, idle:sure], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("draft_tree", GROWTHS, ids=lambda draft_tree: draft_tree.name)
def test_moved_requests_keep_acceptance(
    workshop: Workshop, tmp_path: Path, version: int, draft_tree: DraftTree
) -> None:
    """Texts of unequal length leave, and others move to their slots, with all that the head has kept of them."""
    seen = []
    for batch_size in ([4], [1, 2, 4]):
        target = fresh(workshop.checkpoint(), batch_size=batch_size)
        made = SpeculativeGenerator(drafter(tmp_path / str(len(batch_size)), target, version, draft_tree), target)
        texts = made.sample([TEXT, [4], [33, 2, 9], TEXT[3:]], max_new_tokens=50, eos_token_id=[]).tolist()
        counts = made.statistics
        seen.append((texts, counts.num_rounds, counts.num_draft_tokens_per_pos, counts.num_accepted_tokens_per_pos))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_first_pick_of_a_tree_is_that_of_a_chain(workshop: Workshop, tmp_path: Path, temperature: float) -> None:
    head = drafter(tmp_path, workshop.decoder(slots=4), 3, Chain(2)).head
    sampling = sampling_tensors([Sampling(temperature=temperature, seed=seed) for seed in range(4)])
    positions = torch.tensor([[3], [70], [5], [90]], dtype=torch.int32)
    hidden = torch.randn(4, 1, head.config.hidden_size)
    logprob, picks = best(head, hidden, 3, sampling=sampling, positions=positions)
    chosen = head.kernels.sample_tokens(head.logits(hidden), positions, sampling)
    assert torch.equal(picks[..., 0], chosen)
    assert (logprob <= 0).all() and (logprob.diff(dim=-1) <= 1e-3).all() and (logprob.exp().sum(-1) <= 1.0001).all()


@given(st.lists(st.integers(-3, 0), min_size=4, max_size=30), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_kept_nodes_are_connected_and_ordered_even_with_ties(steps: list[int], random: object) -> None:
    """A child has its parent's value plus a step that is never above 0; many are equal."""
    parents = [random.randrange(-1, node) if node else -1 for node in range(len(steps))]  # type: ignore[attr-defined]
    logprob: list[float] = []
    for parent, step in zip(parents, steps, strict=True):
        logprob.append((logprob[parent] if parent >= 0 else 0.0) + step)
    nodes = (len(steps) + 1) // 2
    tokens, above = kept(
        torch.arange(100, 100 + len(steps), dtype=torch.int32)[None],
        torch.tensor([logprob]),
        torch.tensor([parents], dtype=torch.int32),
        nodes=nodes,
    )
    ids = [token - 100 for token in tokens[0].tolist()]
    assert ids == sorted(sorted(range(len(steps)), key=lambda node: (-logprob[node], node))[:nodes])
    assert [ids[p] if p >= 0 else -1 for p in above[0].tolist()] == [parents[node] for node in ids]
    assert all(-1 <= parent < node for node, parent in enumerate(above[0].tolist()))


def test_a_head_shares_the_tensors_of_its_target(workshop: Workshop, tmp_path: Path) -> None:
    target = workshop.decoder(slots=1)
    one = drafter(tmp_path / "1", target, 1, Chain(2)).head
    three = drafter(tmp_path / "3", target, 3, Chain(2)).head
    assert one.embedding is target.body.model.embedding and one.held.head is target.body.model.head
    assert three.embedding is target.body.model.embedding and three.held.head is not target.body.model.head


def proposed(made: EagleDrafter, real: Tensor) -> tuple[Tensor, Tensor | None]:
    """A greedy proposal after `TEXT` and the token 7, whose features are those of the text's end."""
    made.add_request(0, TEXT, real)
    width = made.draft_shape.depth + 1
    tokens = torch.full((1, width), -1, dtype=torch.int32)
    tokens[0, 0] = 7
    states = torch.zeros(1, width, real.shape[1])
    states[0, 0] = real[-1]
    one, start = torch.ones(1, dtype=torch.int32), torch.tensor([len(TEXT)], dtype=torch.int32)
    commit = Commit(tokens, one, start, states)
    made.update(commit)
    found = made.propose(commit, sampling_tensors([Sampling()]), RoundLimits((one * width).tolist(), len(TEXT) + 1))
    return found.tokens, found.parents if isinstance(found.parents, Tensor) else None
