"""Rows for every drafter of the registry; every test of the contract runs over every row. Contains no tests.

A drafter that is asked for by its name has a row for free. Another one needs a row below that says how to make it.

A row makes a generator over the tiny target, eager. Heads are random: what a drafter is worth is no part of the
contract, and a bad one sees more of a round than a good one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from paceline import FunctionDrafter, MedusaDrafter, NgramDrafter, SpeculativeGenerator, TokenizerPair
from paceline.auto import SamplingDecoder
from paceline.core import tree
from paceline.draft.choice import ChoiceDrafter
from paceline.draft.layerskip import LayerSkipDrafter
from paceline.draft.model import ModelDrafter
from paceline.draft.pard import PardDrafter
from paceline.draft.suffix import SuffixDrafter
from paceline.draft.vocab_map import IntersectionVocabMap, VocabMap
from paceline.draft_spec import DraftSpec, parse_draft
from paceline.eagle.tree import Chain, DraftTree, DynamicTree, StaticTree
from paceline.medusa import checkpoint
from paceline.medusa.config import MedusaConfig
from paceline.medusa.tree import Choices
from paceline.placement.remote.channel import Address, listen
from paceline.placement.remote.drafter import DrafterContract, RemoteDrafter
from paceline.placement.remote.reconnect import DrafterEndpoint
from paceline.placement.remote.server import DraftServer, UnpooledDrafters
from paceline.registry import DRAFTERS
from tests.decoder.tiny import VOCABULARY, Workshop
from tests.draft.block_heads import drafter as block_head
from tests.draft.random_heads import assistant, mlp_speculator, mtp
from tests.draft.tokenizers_of_two import bytes_merged
from tests.eagle.heads import NEWER, PARALLEL, SHARED
from tests.eagle.heads import drafter as eagle_head

Depth = int | Sequence[int]
"""What `SpeculativeGenerator` takes as k."""

SPAN = (0, 1, 2, 4, 8)
BRANCHES = (-1, -1, 0, 0, 1, 2)
SHAPE = tree.draft_shape(BRANCHES)
TREE = f"tree:{','.join(map(str, BRANCHES))}"
SAME = VocabMap(VOCABULARY, VOCABULARY)
CHOICES = Choices.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


@dataclass(frozen=True)
class Home:
    """Parts for the rows: decoders that all tests share, a folder, and what has to be closed again.

    load     how both models are loaded: arguments of `Workshop.decoder`
    options  of the generator; a row's own come first
    known    texts as plain decoding gives them, for rows that know what is right
    """

    workshop: Workshop
    folder: Path
    stack: ExitStack
    slots: int
    load: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    known: list[list[int]] = field(default_factory=list)

    @property
    def target(self) -> SamplingDecoder:
        return self.workshop.decoder(slots=self.slots, **self.load)

    @property
    def draft(self) -> SamplingDecoder:
        return self.workshop.decoder("draft", slots=self.slots, **self.load)

    def generator(self, draft: object, k: Depth | None = None, **own: object) -> SpeculativeGenerator:
        return SpeculativeGenerator(draft, self.target, k=k, **{**self.options, **own})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Row:
    """One way to have a drafter.

    of      its row in `paceline.registry.DRAFTERS`, which says what it can do
    make    the generator for a depth, or for a list of lengths of depths
    depths  that it can have; others have one of their own
    drafts  whether it is certain to propose something in a long text
    """

    of: str
    make: Callable[[Home, Depth], SpeculativeGenerator]
    depths: tuple[int, ...] = (1, 2, 4)
    drafts: bool = True

    @property
    def adaptive_k(self) -> bool:
        """Whether it can be had at several depths at once."""
        can = DRAFTERS[self.of].adaptive_k
        return can == "all" or (can == "chains" and len(self.depths) > 1)


def again(text: list[int]) -> list[int]:
    """A user's function: what followed the last token when it stood in the text before, or some ids, some illegal."""
    at = next((i for i in range(len(text) - 2, -1, -1) if text[i] == text[-1]), None)
    return [text[-1], 3, VOCABULARY + 5] if at is None else text[at + 1 :]


def deepest(k: Depth) -> int:
    return k if isinstance(k, int) else k[-1]


def _given(draft: object, **options: object) -> Callable[[Home, Depth], SpeculativeGenerator]:
    """A drafter that needs nothing; "draft" in it stands for the draft model."""

    def make(home: Home, k: Depth) -> SpeculativeGenerator:
        named = draft if isinstance(draft, list) else [draft]
        parts = [home.draft if one == "draft" else one for one in named]
        return home.generator(parts if isinstance(draft, list) else parts[0], k, **options)

    return make


def _made(draft: Callable[[Home, int], object]) -> Callable[[Home, Depth], SpeculativeGenerator]:
    """A drafter object of a depth."""
    return lambda home, k: home.generator(draft(home, deepest(k)), k)


def _choice(*drafts: object, **options: object) -> Callable[[Home, Depth], SpeculativeGenerator]:
    """A choice, as the grammar reads it; "draft" stands for the draft model."""

    def make(home: Home, k: Depth) -> SpeculativeGenerator:
        parts = parse_draft([home.draft if one == "draft" else one for one in drafts])
        spec = DraftSpec("choice", options=tuple(options.items()), parts=parts)
        return home.generator(spec, k)

    return make


def _choice_of_heads(home: Home, k: int) -> ChoiceDrafter:
    """One of the drafters reads the target's states."""
    heads = eagle_head(home.folder / "eagle 3", home.target, 3, Chain(k))
    return ChoiceDrafter([NgramDrafter(k), heads], choose_by="length")


def _intersection(home: Home, k: int) -> ModelDrafter:
    """Two of three tokens are known to both, under other ids."""
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(5)).tolist()
    names = {(f"w{i}" if i % 3 else f"other{i}"): order[i] for i in range(VOCABULARY)}
    words = {f"w{i}": i for i in range(VOCABULARY)}
    return ModelDrafter(home.draft, k, vocabulary=IntersectionVocabMap(words, names, sizes=(VOCABULARY, VOCABULARY)))


@cache
def tokenizers() -> TokenizerPair:
    """Tokenizers with fewer ids than the models have, so that some ids have no text."""
    return TokenizerPair(target=bytes_merged(80), draft=bytes_merged(52))


def _block(variant: str, draft_tree: str = "chain") -> Callable[[Home, Depth], SpeculativeGenerator]:
    return _made(lambda home, k: block_head(home.folder / variant, home.target, variant, k, draft_tree=draft_tree))


def _medusa(choices: Choices | None) -> Callable[[Home, Depth], SpeculativeGenerator]:
    def make(home: Home, k: int) -> MedusaDrafter:
        target, folder = home.target, home.folder / f"medusa {k}"
        sizes = MedusaConfig(max(3, k), 1, target.config.hidden_size, VOCABULARY, tied=True)
        torch.manual_seed(0)
        checkpoint.save(folder, sizes, {name: torch.randn(size) * 0.2 for name, size in sizes.shapes().items()})
        return MedusaDrafter.from_pretrained(folder, target, draft_tree=choices or Choices.chain(k))

    return _made(make)


def _eagle(
    version: int, draft_tree: Callable[[int], DraftTree], **changes: object
) -> Callable[[Home, Depth], SpeculativeGenerator]:
    def make(home: Home, k: int) -> object:
        return eagle_head(
            home.folder / f"eagle {version} {', '.join(changes)}", home.target, version, draft_tree(k), **changes
        )

    return _made(make)


def _mlp_speculator(draft_tree: str = "chain") -> Callable[[Home, Depth], SpeculativeGenerator]:
    return _made(lambda home, k: mlp_speculator(home.folder / f"mlp {k}", home.target, k, draft_tree=draft_tree))


def _remote(home: Home, k: int) -> RemoteDrafter:
    """A drafter over a socket; the other end is a thread, which saves the time to start a process."""
    address, secret = Address(path=str(home.folder / f"socket {k} {home.slots}")), b"a secret of the tests"
    decoder = home.draft.sibling()
    drafters = UnpooledDrafters(lambda _: ModelDrafter(decoder, k, vocabulary=SAME))
    server = DraftServer(listen(address), secret, drafters)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    home.stack.callback(thread.join)
    home.stack.callback(server.stop)
    contract = DrafterContract(k, home.slots, VOCABULARY, max_positions=decoder.n_positions)
    drafter = RemoteDrafter(contract, DrafterEndpoint(address, secret))
    home.stack.callback(drafter.close)
    assert drafter.wait_until_up(30)
    return drafter


ROWS: dict[str, Row] = {
    "none": Row("none", _given(None), drafts=False),
    "none, by name": Row("none", _given("none"), drafts=False),
    "ngram": Row("ngram", _given("ngram"), depths=SPAN),
    "ngram, first": Row("ngram", _made(lambda _, k: NgramDrafter(k, prefer="first", prompt_lookup_max=2))),
    "suffix": Row("suffix", _given("suffix"), drafts=False),
    "suffix, with a corpus": Row("suffix", _made(lambda _, k: SuffixDrafter(k, min_match=1, max_cached_tokens=60))),
    "function": Row("function", _made(lambda _, k: FunctionDrafter(again, k))),
    "model": Row("model", _given("draft", fused=False), depths=SPAN),
    "model, fused": Row("model", _given("draft", fused=True), depths=SPAN[1:]),
    "model, any width": Row("model", _given("draft", exact=False)),
    "model, in doubt": Row("model", _given("draft", confidence_threshold=0.3)),
    "PARD": Row("pard", _made(lambda home, k: PardDrafter(home.draft, k, mask=7, vocabulary=SAME))),
    "PARD static tree": Row(
        "pard", _made(lambda home, _: PardDrafter(home.draft, SHAPE, mask=7, vocabulary=SAME)), depths=(3,)
    ),
    "list: suffix, ngram, model": Row("fallback", _given(["suffix", "ngram", "draft"])),
    "list: model, function": Row("fallback", _given(["draft", again])),
    "choice: model, function, by speed": Row("choice", _choice("draft", again)),
    "choice: ngram, EAGLE 3 chain": Row("choice", _made(_choice_of_heads)),
    "intersection": Row("model", _made(_intersection)),
    "retokenize": Row("retokenizing", lambda home, k: home.generator(home.draft, k, vocabulary=tokenizers())),
    "list: ngram, retokenize": Row(
        "fallback",
        lambda home, k: home.generator(["ngram", home.draft], k, vocabulary=tokenizers()),
    ),
    "Medusa chain": Row("medusa", _medusa(None)),
    "Medusa tree": Row("medusa", _medusa(CHOICES), depths=(3,)),
    "EAGLE 1 chain": Row("eagle", _eagle(1, Chain)),
    "P-EAGLE static tree": Row("eagle", _eagle(3, lambda _k: StaticTree(BRANCHES), **PARALLEL), depths=(3,)),
    "EAGLE 2": Row("eagle", _eagle(1, lambda _k: DynamicTree(6, depth=3, width=3)), depths=(3,)),
    "EAGLE 3 chain": Row("eagle", _eagle(3, Chain)),
    "EAGLE 3 static tree": Row("eagle", _eagle(3, lambda _k: StaticTree(BRANCHES)), depths=(3,)),
    "EAGLE 3 dynamic tree": Row("eagle", _eagle(3, lambda _k: DynamicTree(6, depth=3, width=3)), depths=(3,)),
    "EAGLE 3.1 chain": Row("eagle", _eagle(3, Chain, **NEWER)),
    "EAGLE 3.1 dynamic tree": Row(
        "eagle", _eagle(3, lambda _k: DynamicTree(6, depth=3, width=3), **SHARED), depths=(3,)
    ),
    "P-EAGLE": Row("eagle", _eagle(3, Chain, **PARALLEL)),
    "DFlash": Row("dflash", _block("DFlash")),
    "DFlash 2": Row("dflash", _block("DFlash 2")),
    "DSpark": Row("dflash", _block("DSpark")),
    "DFlash static tree": Row("dflash", _block("DFlash", TREE), depths=(3,)),
    "DSpark static tree": Row("dflash", _block("DSpark", TREE), depths=(3,)),
    "MTP": Row("mtp", _made(lambda home, k: mtp(home.target, k))),
    "MTP static tree": Row("mtp", _made(lambda home, _: mtp(home.target, SHAPE)), depths=(3,)),
    "model static tree": Row(
        "model", _made(lambda home, _: ModelDrafter(home.draft, SHAPE, vocabulary=SAME)), depths=(3,)
    ),
    "MLP speculator": Row("mlp_speculator", _mlp_speculator()),
    "MLP speculator static tree": Row("mlp_speculator", _mlp_speculator(TREE), depths=(3,)),
    "Gemma 4 assistant": Row("gemma4_assistant", _made(lambda home, k: assistant(home.target, k))),
    "Gemma 4 assistant static tree": Row(
        "gemma4_assistant", _made(lambda home, _: assistant(home.target, SHAPE)), depths=(3,)
    ),
    "LayerSkip": Row("layerskip", _made(lambda home, k: LayerSkipDrafter(k, home.target, layers=1))),
    "LayerSkip static tree": Row("layerskip", _given(f"layerskip:layers=1,draft_tree={TREE}"), depths=(3,)),
    "list: ngram, LayerSkip": Row(
        "fallback", lambda home, k: home.generator(["ngram", ("layerskip:layers=1", deepest(k))], k)
    ),
    "remote": Row("remote", _made(_remote)),
}

ROWS |= {
    name: Row(name, _given(name), drafts=False)
    for name, registered in DRAFTERS.items()
    if registered.given_as == "name" and all(row.of != name for row in ROWS.values())
}
