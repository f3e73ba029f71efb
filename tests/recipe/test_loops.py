"""The part of the demo pair's recipe that trains the target out of its loops: what a loop is, and what is learned."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


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
