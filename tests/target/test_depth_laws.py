"""The joint distribution of three tokens where depths change, and with a draft of another tokenizer."""

from __future__ import annotations

import pytest

from paceline.core.acceptance.base import AcceptanceRule
from paceline.core.acceptance.match import Match
from paceline.core.acceptance.rejection import Reject
from paceline.core.protocols import Drafter
from paceline.core.sampling import Sampling
from paceline.core.types import DraftShape
from paceline.draft.retokenizing import RetokenizingDrafter, TokenizerPair
from paceline.engine.adaptive import DraftLengthController, DraftLengthPolicy
from paceline.engine.rounds import RoundPlan, Rounds
from paceline.target.verifier import CompiledVerifier
from tests.fakes import TableDecoder, joint, misfit, table
from tests.target.three_tokens import PROMPT, TARGET, K, model, one_depth, three_tokens

RAW = Sampling(temperature=1.0)
SLOTS = 15_000


class Dice(DraftLengthController):
    """Any draft length at any time; the first round is the deepest, because it has the distribution of a draft."""

    def choose(self, deepest: int) -> int:
        self.turn = getattr(self, "turn", -1) + 1
        return (self.draft_lengths[-1], *self.draft_lengths)[self.turn % (len(self.draft_lengths) + 1)]

    def allot(self, length: int) -> list[int]:
        """By the history of each request: where drafts stood, more are verified."""
        return [sum(chance >= 0.3 * (self.turn % 3) for chance in chances) for chances, _ in self.standing]


def many_depths(source: Drafter, target: TableDecoder, rule: AcceptanceRule) -> Rounds:
    """Draft lengths in turn, each with a verifier and commits of that width; requests compete for rows."""
    target.body.skips_idle = True
    lengths = {
        depth: RoundPlan(
            source.shortened(depth) if depth else source,
            CompiledVerifier(target, DraftShape.chain(depth), rule=rule, wide=False),
            depth + 1,
            drafts=depth > 0,
        )
        for depth in (0, 1, 2, K)
    }
    policy = DraftLengthPolicy(Dice((0, 1, 2, K)), competes=True)
    rounds = Rounds(source, lengths, policy=policy)
    for slot in range(target.batch_size):
        rounds._seated.add(slot)
        policy.begin(slot)
    return rounds


class Letters:
    """A tokenizer of plain Python, since it is called for every slot: id i says ``words[i]``; the longest word wins."""

    bos_token_id = None

    def __init__(self, words: list[str]) -> None:
        self._words, self._ids = words, {word: i for i, word in enumerate(words)}

    def encode(self, text: str, **_: object) -> list[int]:
        found, at = [], 0
        while at < len(text):
            size = 2 if text[at : at + 2] in self._ids else 1
            found.append(self._ids[text[at : at + size]])
            at += size
        return found

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(self._words[i] for i in token_ids)


def reencoding(slots: int) -> RetokenizingDrafter:
    words = list("hgfedcba")
    tokenizers = TokenizerPair(target=Letters(list("abcdefgh")), draft=Letters([*words, "cf", "ab"]))
    draft = TableDecoder(table(len(words) + 2, seed=4), slots=slots, kv_buckets=(24,))
    return RetokenizingDrafter(draft, K, tokenizers=tokenizers)


@pytest.mark.parametrize(("drawn", "confidence"), [(False, 0.0), (True, 0.0), (True, 0.4)])
def test_changing_draft_lengths_keep_the_joint_distribution(drawn: bool, confidence: float) -> None:
    """Lengths change from round to round, from slot to slot by their gain, and where the draft is uncertain."""
    rule = Reject() if drawn else Match()
    source = model(SLOTS, drawn=drawn, confidence_threshold=confidence)
    tokens, mean = three_tokens(source, rule, params=RAW, slots=SLOTS, rounds_of=many_depths, by_itself=True)
    assert misfit(tokens, joint(TARGET, *PROMPT[-2:])) > 1e-3
    assert mean > 1.1


def test_a_draft_with_another_tokenizer_keeps_the_joint_distribution() -> None:
    slots = 4_000
    source = reencoding(slots)
    for rounds_of in (one_depth, many_depths):
        tokens, mean = three_tokens(source, Match(), params=RAW, slots=slots, rounds_of=rounds_of)
        assert misfit(tokens, joint(TARGET, *PROMPT[-2:])) > 1e-3
        assert mean > 1.02
        for slot in range(slots):
            source.finish_request(slot)
