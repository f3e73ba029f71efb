"""Parts of the demo pair's recipe: the target is trained out of its loops, and heads are pointed at earlier text.

The recipe is not an installed package: its folder is put on the path, for one test at a time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(autouse=True)
def recipe_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples" / "pycode"))
    for name in [name for name in sys.modules if name.split(".")[0] == "recipe"]:
        monkeypatch.delitem(sys.modules, name)


def test_a_loop_begins_with_the_third_round() -> None:
    from recipe.loops import looping

    text, piece = torch.arange(100, 130), torch.arange(10, 40)
    thrice = looping(torch.cat([text, piece, piece, piece])[None])[0]
    assert thrice.tolist() == [False] * 90 + [True] * 30
    assert not looping(torch.cat([text, piece, piece, text])[None]).any(), "what comes twice is a copy"
    short = looping(torch.cat([text, torch.tensor([1, 2] * 10), text])[None])[0]
    assert short.nonzero().flatten().tolist() == list(range(30 + 14, 30 + 20)), "12 tokens at least"


def test_looping_tokens_become_less_likely_and_nothing_else_counts() -> None:
    from recipe.loops import looping, unlikelihood

    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "hidden_size": 16}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **shape))
    ids = torch.tensor([[*range(20, 30), *([1, 2, 3] * 8)]])
    found = looping(ids)
    losses = []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(5):
        loss = unlikelihood(model(ids[:, :-1]).logits, ids, found)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 1.2
    assert unlikelihood(model(ids[:, :-1]).logits, ids, torch.zeros_like(found)).item() == 0


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
