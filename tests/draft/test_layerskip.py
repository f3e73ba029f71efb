"""The first layers of the target draft: as a model of these layers would, without a separate cache or weights."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from paceline import SpeculativeGenerator
from paceline.core.errors import ConfigurationError
from paceline.draft.layerskip import LayerSkipDrafter
from tests.decoder.tiny import Workshop
from tests.draft.random_heads import TREE, rounds, simulated_rounds, simulated_tree_rounds

PROMPTS = [[5, 17, 17, 90], [4], [33, 2, 9, *range(20, 45)]]
SAMPLINGS: list[dict[str, object]] = [{}, {"do_sample": True, "temperature": 0.8, "seed": 11}]


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_layerskip_acceptance_equals_that_of_a_model_of_its_layers(workshop: Workshop, backend: str) -> None:
    """The draft of the workshop is the first layer of its target: same drafts, whichever writes to the cache."""
    draft, target = workshop.pair(backend=backend)
    for sampling in SAMPLINGS:
        for prompts in (PROMPTS[:1], PROMPTS):
            found = []
            for drafts, fused in ((draft, True), ("layerskip:layers=1", True), ("layerskip:layers=1", False)):
                generator = SpeculativeGenerator(drafts, target, k=3, fused=fused)
                ours = generator.sample(prompts, max_new_tokens=24, **sampling)
                assert torch.equal(ours, target.sample(prompts, max_new_tokens=24, **sampling)), sampling
                found.append((generator.statistics.num_rounds, generator.statistics.num_accepted_tokens_per_pos))
            assert found[0] == found[1] == found[2] and found[0][1][0] > 0


def test_rounds_equal_those_of_transformers_early_exit(workshop: Workshop) -> None:
    """`EarlyExitCandidateGenerator` sets the number of layers and drafts greedily; so does this simulation."""
    target = workshop.decoder(slots=1)
    model = LlamaForCausalLM.from_pretrained(workshop.checkpoint(), dtype=torch.float32).eval()
    model.model.config.num_hidden_layers = 1

    def draft(text: list[int]) -> list[int]:
        ids = torch.tensor([text])
        return model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False)[0, len(text) :].tolist()

    generator = SpeculativeGenerator(LayerSkipDrafter(3, target, layers=1), target)
    text, accepted = rounds(generator, PROMPTS[0], 40)
    expected = simulated_rounds(text, len(PROMPTS[0]) + 1, 3, draft)
    assert accepted[: len(expected)] == expected and 0 < sum(expected) < 3 * len(expected)


@pytest.mark.parametrize("which", ["layerskip:layers=1,", "model"])
def test_acceptance_of_a_tree_equals_a_simulation(workshop: Workshop, which: str) -> None:
    """Child r of a node is the token of rank r after the node's path, by transformers' passes over whole texts."""
    target = workshop.decoder(slots=1)
    model = LlamaForCausalLM.from_pretrained(workshop.checkpoint("draft"), dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(known: list[int], path: list[int]) -> torch.Tensor:
        return model(torch.tensor([known + path])).logits[0, -1]  # type: ignore[no-any-return]

    named = f"{workshop.checkpoint('draft')}:" if which == "model" else which
    text, accepted = rounds(SpeculativeGenerator(f"{named}draft_tree={TREE}", target), PROMPTS[0], 40)
    wanted = simulated_tree_rounds(text, len(PROMPTS[0]) + 1, logits)
    assert accepted[: len(wanted)] == wanted and 0 < sum(wanted) < 3 * len(wanted)


def test_layerskip_runs_a_quarter_of_the_layers_by_default(workshop: Workshop) -> None:
    target = workshop.decoder(slots=1)
    assert LayerSkipDrafter(2, target).layers == 1
    assert LayerSkipDrafter(2, target).state is target.body, "nothing is copied"


@pytest.mark.parametrize("layers", [0, 2, -1])
def test_layerskip_needs_fewer_layers_than_the_target(workshop: Workshop, layers: int) -> None:
    target = workshop.decoder(slots=1)
    said = f"layers: expected 1 to 1, fewer than the target's 2, got {layers}"
    with pytest.raises(ConfigurationError, match=said):
        SpeculativeGenerator(f"layerskip:layers={layers}", target, k=3)
    with pytest.raises(ConfigurationError, match=said):
        LayerSkipDrafter(3, target, layers=layers)
