"""An EAGLE head over the ranks of its target: the drafts of the whole head, and each rank's part of the work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.auto_drafter import make_drafter
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigurationError
from paceline.eagle import checkpoint
from paceline.eagle.division import is_divided
from paceline.eagle.drafter import EagleDrafter
from paceline.eagle.tree import Chain, DraftTree, DynamicTree, StaticTree
from tests.decoder.test_ranks import DEGREES, SETTINGS, load, tokens
from tests.decoder.tiny import VOCABULARY, Workshop
from tests.eagle import heads
from tests.eagle.heads import PARALLEL, SHARED


@pytest.fixture(scope="module", params=DEGREES)
def target(request: pytest.FixtureRequest, workshop: Workshop) -> Iterator[SamplingDecoder]:
    """Keep the processes of this degree alive for all tests of this module."""
    made = load(workshop, request.param)
    yield made
    made.close()


EAGLE_HEADS: dict[str, tuple[int, DraftTree, str, dict[str, object]]] = {
    "1, chain": (1, Chain(3), "greedy", dict.fromkeys(("fc_bias", "attention_bias", "mlp_bias", "input_norm"), True)),
    "3, chain, drafts some": (3, Chain(3), "sampled", {"norm_before_residual": True}),
    "3, static tree, drafts all": (3, StaticTree((-1, -1, 0, 0, 1)), "cut", {"draft_vocab_size": VOCABULARY}),
    "3, dynamic tree, drafts some": (3, DynamicTree(5, depth=2, width=2), "sampled", {}),
    "3.1, two layers, target's output": (3, Chain(3), "sampled", {**SHARED, "norm_before_fc": True}),
    "P-EAGLE": (3, Chain(3), "sampled", PARALLEL),
}


@pytest.mark.parametrize(
    ("target", "name"),
    [
        *((DEGREES[number % 2], name) for number, name in enumerate(EAGLE_HEADS)),
        (2, "3, static tree, drafts all"),  # whole heads of queries and of keys on each; nothing is padded
    ],
    indirect=["target"],
    scope="module",
)
def test_heads_on_ranks_keep_the_tokens(workshop: Workshop, target: SamplingDecoder, tmp_path: Path, name: str) -> None:
    """A head that is divided, one that every rank has all of, and one rank draft the same."""
    version, draft_tree, setting, changes = EAGLE_HEADS[name]
    drafted = []
    whole_too = [(target, False)] if draft_tree.draft_shape.dynamic else []
    for model, divided in ((load(workshop, 1), None), (target, True), *whole_too):
        drafter = heads.drafter(tmp_path, model, version, draft_tree, divided=divided, **changes)
        generator = SpeculativeGenerator(drafter, model, fused=False if divided and version == 1 else None)
        assert tokens(generator, **SETTINGS[setting]) == tokens(model, **SETTINGS[setting])
        drafted.append((generator.statistics.num_accepted_tokens_per_pos, generator.statistics.num_drafts))
        assert drafter.head.group.degree == (model.options.layout.degree if divided else 1)
    assert all(one == drafted[0] for one in drafted)


def test_a_rank_holds_its_shard_of_an_eagle_head(workshop: Workshop, target: SamplingDecoder, tmp_path: Path) -> None:
    """Half of 4 heads, 2 of keys, 48 columns of the MLP and 48 ids that can be drafted."""
    degree, whole = target.options.layout.degree, load(workshop, 1)
    every, own = (heads.drafter(tmp_path, one, 3, Chain(2), divided=one is target).head for one in (whole, target))
    config = every.config
    assert own.network.weights.head.shape == (config.draft_vocab_size // degree, config.hidden_size)
    layer = own.network.weights.layers[0]
    assert own.caches()[0][0].shape[1] == 1 and layer.out.shape[1] < config.num_heads * config.head_dim
    assert -(-config.intermediate_size // degree) == layer.mlp.down.shape[1]
    sizes = [sum(x.numel() for name, x in made.named_parameters() if name != "embedding") for made in (own, every)]
    assert sizes[0] < 0.6 * sizes[1]


def test_a_separate_head_embedding_is_sharded_too(workshop: Workshop, target: SamplingDecoder, tmp_path: Path) -> None:
    found = heads.random_head(heads.config(target.config, 1))
    torch.manual_seed(7)
    embedding = torch.randn(VOCABULARY, target.config.hidden_size)
    checkpoint.save(tmp_path, replace(found, embedding=embedding))
    drafted = []
    for model, divided in ((load(workshop, 1), None), (target, True)):
        drafter = EagleDrafter.from_pretrained(tmp_path, model, Chain(2), divided=divided)
        assert len(drafter.head.embedding) == -(-VOCABULARY // model.options.layout.degree)
        generator = SpeculativeGenerator(drafter, model)
        assert tokens(generator) == tokens(model)
        drafted.append(generator.statistics.num_accepted_tokens_per_pos)
    assert drafted[0] == drafted[1]


def test_a_small_eagle_head_is_replicated_by_default(workshop: Workshop, tmp_path: Path) -> None:
    whole = load(workshop, 1)
    sizes = heads.config(whole.config, 3)
    assert not is_divided(sizes, 4) and is_divided(sizes, 4, True)
    large = replace(sizes, hidden_size=4096, intermediate_size=12288, num_heads=32, num_kv_heads=8, head_dim=128)
    assert is_divided(large, 2) and not is_divided(large, 8, False) and not is_divided(large, 1)
    with pytest.raises(ConfigurationError, match="divided: expected a target with tp_degree=2 or more for"):
        heads.drafter(tmp_path, whole, 3, Chain(2), divided=True)
    for value, said in (
        ("true", "divided: expected a target with tp_degree=2 or more for"),
        ("yes", "divided: expected true or false .*, got 'yes'"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            make_drafter(SpeculativeConfig(draft=f"{tmp_path}:divided={value}"), whole)
