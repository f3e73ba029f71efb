"""The part of the demo pair's recipe that points heads at earlier text: at the right places, and at nothing else."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LlamaForCausalLM


def test_occurrences_are_the_positions_after_the_same_two_tokens() -> None:
    from recipe.wiring import behind_occurrences

    ids = torch.tensor([[7, 8, 9, 7, 8, 5, 8, 7, 8]])
    found = behind_occurrences(ids)[0]
    assert found.nonzero().tolist() == [[4, 2], [8, 2], [8, 5]], "(7, 8) ended at 1, 4 and 8; nothing else came twice"


def test_a_repeated_row_has_its_first_half_again_with_one_id_exchanged() -> None:
    from recipe.modelling import repeated

    for seed in range(20):
        row = np.random.default_rng(seed).integers(0, 50, 65).astype(np.uint16)
        made = repeated(row, np.random.default_rng(seed))
        first, again = np.sort(made[:32]), np.sort(made[32:64])
        assert len(made) == len(row) and made[64] == row[64] and sorted(first) == sorted(row[:32])
        gone, new = set(first) - set(again), set(again) - set(first)
        assert len(gone) <= 1 and len(new) <= 1


def test_aiming_changes_only_the_planned_heads_and_directs_them() -> None:
    from recipe.modelling import new_model
    from recipe.wiring import Aim, Heads, aim_heads, inputs_of

    torch.manual_seed(0)
    model: LlamaForCausalLM = new_model(128, 1, 4, 2, 48).eval().requires_grad_(False)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    aim = Aim(0, (0, 1), (1, 2))
    batches = [torch.randint(1, 90, (4, 32)) for _ in range(4)]
    aim_heads(model, aim, batches, steps=200)
    changed = {name: (x != before[name]).any(-1) for name, x in model.state_dict().items() if not x.equal(before[name])}
    part = "model.layers.0.self_attn."
    assert set(changed) == {f"{part}q_proj.weight", f"{part}k_proj.weight", "model.embed_tokens.weight"}
    assert changed[f"{part}q_proj.weight"].nonzero().flatten().tolist() == list(range(64))
    assert changed[f"{part}k_proj.weight"].nonzero().flatten().tolist() == list(range(32))
    heads, text = Heads(model, aim), torch.randint(1, 90, (4, 32))
    x, turn = inputs_of(model, 0, text)
    looks = heads.scores(x, turn, *heads.weights).exp()
    assert looks[:, 0].diagonal(-1, -2, -1).mean() > 0.5 and looks[:, 1].diagonal(-2, -2, -1).mean() > 0.5
