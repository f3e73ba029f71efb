"""The steps that compilers are given, over tiny decoders, with inputs for them; no tests in here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from paceline.core.accept import Match, Reject
from paceline.decoder.decoder import Body
from paceline.decoder.steps import PrefillStep, WindowStep
from paceline.draft.model import DraftStep
from paceline.target.verifier import VerifyStep
from tests.decoder.tiny import VOCABULARY

SLOTS, NODES, WIDTH = 4, 2, 3

draft = partial(DraftStep, length=NODES, vocab_size=VOCABULARY)
STEPS: dict[str, Callable[[Body, int], nn.Module]] = {
    "prefill": PrefillStep,
    "window": WindowStep,
    "verify": partial(VerifyStep, acceptor=Match()),
    "verify nothing": partial(VerifyStep, acceptor=Match()),
    "verify, reject, drawn": partial(VerifyStep, acceptor=Reject()),
    "draft": partial(draft, drawn=False),
    "draft, drawn": partial(draft, drawn=True),
}


def inputs(name: str, seed: int, *, row: int | None = None, slots: int = SLOTS) -> tuple[Tensor, ...]:
    """Inputs of a step; another seed changes every value and no shape. ``row``: where every slot's tokens go."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    def rows(count: int) -> Tensor:
        return ids(0, 90, count) if row is None else torch.full((count,), row, dtype=torch.int32)

    if name == "prefill":
        return ids(0, VOCABULARY, 1, 16), rows(1), ids(1, 16, 1), ids(0, slots, 1)
    if name == "window":
        return ids(0, VOCABULARY, slots, WIDTH), rows(slots)
    commit = (ids(0, VOCABULARY, slots, WIDTH), ids(1, WIDTH, slots), rows(slots))
    temperature, top_k = torch.rand(slots, generator=generator) * seed, ids(0, 40, slots).to(torch.float32)
    top_p, min_p = 1 - torch.rand(2, slots, generator=generator) * 0.3
    knobs = torch.stack((temperature, top_k, top_p, 0.1 - min_p * 0.1), 1)
    keys = ids(-(1 << 31), (1 << 31) - 1, slots, 2)
    if name.startswith("draft"):
        return *commit, knobs, keys
    drafts, law = ids(-1, VOCABULARY, slots, NODES), torch.rand(slots, NODES, VOCABULARY, generator=generator)
    more = {"verify nothing": (), "verify, reject, drawn": (drafts, law)}.get(name, (drafts,))
    return *commit, ids(0, NODES + 1, slots), knobs, keys, *more
