"""IBM's MLP speculator: compared with its formulas in plain PyTorch; files are read right or refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from paceline import AutoDrafter, SpeculativeGenerator
from paceline.core.errors import CheckpointError, ConfigurationError, PairingError, UnknownArchitectureError
from paceline.draft.mlp_speculator import MlpSpeculatorConfig, MlpSpeculatorDrafter, load
from tests.decoder.tiny import Workshop, fresh
from tests.draft.random_heads import (
    TREE,
    mlp_speculator,
    random_weights,
    rounds,
    save_mlp_speculator,
    save_narrowed,
    simulated_rounds,
    simulated_tree_rounds,
)

PROMPTS = [[5, 17, 17, 90], [4], [33, 2, 9, *range(20, 45)]]
KINDS = [(False, True), (True, True), (True, False)]


def plain(
    weights: dict[str, Tensor], sizes: MlpSpeculatorConfig, state: Tensor, token: int, path: Sequence[int] = ()
) -> list[Tensor]:
    """The logits of every stage after a state [H] and a token, by the formulas of the paper; drafts are those of
    ``path``, and then chosen greedily.
    """
    share = 0.5 ** (0.5 / sizes.stages)
    added = math.sqrt((1 - share * share) * (sizes.inner_size / 2)) / share
    if sizes.scale_input:
        state = state / (state.pow(2).mean() + 1e-6).sqrt() / math.sqrt(2)
    found = []
    for index in range(sizes.stages):
        stage, proj = (0, min(index, 1)) if sizes.tied else (index, index)
        x = weights[f"proj.{proj}.weight"] @ state + added * weights[f"emb.{stage}.weight"][token]
        x = x / (x.pow(2).mean() + 1e-6).sqrt()
        state = F.gelu(x * weights[f"ln.{stage}.weight"] + weights[f"ln.{stage}.bias"])
        found.append(weights[f"head.{stage}.weight"] @ state)
        token = path[index] if index < len(path) else int(found[-1].argmax())
    return found


@pytest.mark.parametrize(("tied", "scale_input"), KINDS)
def test_mlp_speculator_logits_and_rounds_equal_the_formulas(
    workshop: Workshop, tmp_path: Path, tied: bool, scale_input: bool
) -> None:
    target = fresh(save_narrowed(workshop.checkpoint(), tmp_path / "target"))
    drafter = mlp_speculator(tmp_path, target, 3, tied=tied, scale_input=scale_input)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "target").eval()
    sizes, weights = load(tmp_path, target.config)
    assert (sizes.tied, sizes.scale_input, sizes.stages) == (tied, scale_input, 3)

    @torch.inference_mode()
    def logits(text: list[int]) -> list[Tensor]:
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1][0]
        return plain(weights, sizes, states[-1], text[-1])

    with torch.inference_mode():
        wanted = logits(PROMPTS[2])
        raw = model(torch.tensor([PROMPTS[2][:-1]]), output_hidden_states=True).hidden_states[-1][:, -1:]
    state, token = drafter.head.first(raw.contiguous()), PROMPTS[2][-1]
    for index, one in enumerate(wanted):
        state, ours = drafter.head.stage(index, state, torch.tensor([[token]]).int())
        assert torch.allclose(ours[0, 0], one, atol=1e-4)
        token = int(one.argmax())
    text, accepted = rounds(SpeculativeGenerator(drafter, target), PROMPTS[0], 40)
    drafts = [[int(one.argmax()) for one in logits(text[:n])] for n in range(5, len(text))]
    expected = simulated_rounds(text, 5, 3, lambda known: drafts[len(known) - 5])
    assert accepted[: len(expected)] == expected and 0 < sum(expected) < 3 * len(expected)


def test_nodes_of_a_tree_are_the_best_tokens_of_a_stage(workshop: Workshop, tmp_path: Path) -> None:
    target = fresh(save_narrowed(workshop.checkpoint(), tmp_path / "target"))
    mlp_speculator(tmp_path, target, 3)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "target").eval()
    sizes, weights = load(tmp_path, target.config)

    @torch.inference_mode()
    def logits(known: list[int], path: list[int]) -> Tensor:
        state = model(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states[-1][0, -1]
        return plain(weights, sizes, state, known[-1], path)[len(path)]

    text, accepted = rounds(SpeculativeGenerator(f"{tmp_path}:draft_tree={TREE}", target), PROMPTS[0], 40)
    wanted = simulated_tree_rounds(text, len(PROMPTS[0]) + 1, logits)
    assert accepted[: len(wanted)] == wanted and 0 < sum(wanted) < 3 * len(wanted)
    with pytest.raises(ConfigurationError, match="draft_tree: expected at most 3 levels"):
        SpeculativeGenerator(f"{tmp_path}:draft_tree=tree:-1,0,1,2", target)


def test_copies_of_tied_weights_must_be_equal(workshop: Workshop, tmp_path: Path) -> None:
    """A file may hold the shared tensors once, or again for every stage."""
    target = workshop.decoder()
    sizes = MlpSpeculatorConfig(3, target.config.hidden_size, 24, target.config.vocab_size, True, True)
    weights = random_weights(sizes.shapes())
    copies = {f"emb.{i}.weight": weights["emb.0.weight"].clone() for i in (1, 2)}
    copies["proj.2.weight"] = weights["proj.1.weight"].clone()
    save_mlp_speculator(tmp_path, sizes, {**weights, **copies})
    assert load(tmp_path, target.config)[1].keys() == weights.keys()
    copies["emb.2.weight"][0] += 1
    save_mlp_speculator(tmp_path, sizes, {**weights, **copies})
    with pytest.raises(CheckpointError, match=r"expected emb\.2\.weight equal to emb\.0\.weight"):
        load(tmp_path, target.config)
    save_mlp_speculator(tmp_path, replace(sizes, tied=False), {**weights, **copies})
    with pytest.raises(CheckpointError, match=r"expected the tensors head\.1\.weight"):
        load(tmp_path, target.config)


def test_draft_length_is_at_most_the_number_of_stages(workshop: Workshop, tmp_path: Path) -> None:
    target = workshop.decoder()
    mlp_speculator(tmp_path, target, 3)
    with pytest.raises(ConfigurationError, match=r"k: expected a draft depth of 3 for .*, got 4; use 1 to 3"):
        SpeculativeGenerator(str(tmp_path), target, k=4)
    for k, length in ((None, 3), (2, 2)):
        drafter = SpeculativeGenerator(str(tmp_path), target, k=k).drafter
        assert isinstance(drafter, MlpSpeculatorDrafter) and drafter.draft_shape.depth == length


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"n_predict": 1 << 40}, CheckpointError, "n_predict: expected less than 128, got"),
        ({"vocab_size": 97}, PairingError, "expected a target with vocabulary 97 for this MLP speculator, got 96"),
        ({"emb_dim": 64}, PairingError, "expected a target with hidden size 64"),
        ({"method": "sum_lstm"}, UnknownArchitectureError, "'method' is not a known setting of an MLP speculator"),
        ({"n_predict": 2}, CheckpointError, "got also emb.2.weight"),
        ({"inner_dim": 0}, CheckpointError, r"emb.0.weight: expected shape \[96, 32\]"),
        ({"n_predict": 1, "tie_weights": True}, CheckpointError, "tie_weights: expected false for one stage"),
    ],
)
def test_mlp_speculator_keys_that_change_the_output_are_rejected_by_name(
    workshop: Workshop, tmp_path: Path, changes: dict[str, object], error: type[Exception], said: str
) -> None:
    target = workshop.decoder()
    mlp_speculator(tmp_path, target, 3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(error, match=said):
        AutoDrafter.from_pretrained(tmp_path, target)
