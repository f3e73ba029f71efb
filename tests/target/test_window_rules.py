"""Permitted effects of processors and number formats on a window of drafts: golden figures, and near-ties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from paceline import FunctionDrafter, SpeculativeGenerator
from paceline.core.acceptance.base import AcceptanceRule
from paceline.core.acceptance.match import Match
from paceline.core.acceptance.rejection import Reject
from paceline.core.protocols import finish
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import PAD, Commit, DraftShape, Proposal, RoundLimits
from paceline.target.host_verifier import HostVerifier
from tests.decoder.tiny import Workshop
from tests.equality.settings import PROMPTS, run, texts
from tests.fakes import TableDecoder
from tests.target.three_tokens import SlotText

BEGIN, OWN, LIKELY, OTHER = 5, 2, 1, 15


class FrequencyPenalty:
    """Takes ``penalty`` from a token for every occurrence in the text after the prompt."""

    def __init__(self, penalty: float, *, prompt: int) -> None:
        self._penalty, self._prompt = penalty, prompt
        self.seen: list[list[int]] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        new = ids[0, self._prompt :]
        self.seen.append(new.tolist())
        return scores - self._penalty * torch.bincount(new, minlength=scores.shape[-1])


def always(likely: float = 6.0) -> TableDecoder:
    """Says OWN after BEGIN; then LIKELY, with OTHER one below it, whatever stands before."""
    logits = torch.zeros(16, 16, 16)
    logits[..., LIKELY], logits[..., OTHER] = likely, likely - 1
    logits[0, BEGIN, OWN] = 20.0
    return TableDecoder(logits)


@pytest.mark.parametrize("rule", [Match(), Reject()], ids=["match", "reject"])
@pytest.mark.parametrize(
    ("penalty", "wanted"), [(1.5, [LIKELY, OTHER]), (0.7, [LIKELY, LIKELY, OTHER])], ids=["strong", "weak"]
)
def test_frequency_penalty_matches_the_golden_case(penalty: float, wanted: list[int], rule: AcceptanceRule) -> None:
    """Rule C28, vLLM's case: text [2], drafts [1, 1, 1]; a draft counts for the rows after it and a rejected one for
    none. 0.7 takes the third 1 (then 0.4 below 15), 1.5 the second.
    """
    penalise = FrequencyPenalty(penalty, prompt=1)
    text = SlotText([BEGIN], penalise)
    verifier = HostVerifier(always(), DraftShape.chain(3), rule=rule, wide=True, slots=[text])
    greedy = sampling_tensors([Sampling()])
    assert finish(verifier.prefill(0, [BEGIN], greedy)).token == OWN
    text.append(OWN)
    one = torch.ones(1, dtype=torch.int32)
    commit = Commit(torch.tensor([[OWN, PAD, PAD, PAD]], dtype=torch.int32), one, one)
    proposal = Proposal(torch.full((1, 3), LIKELY, dtype=torch.int32))
    made = verifier(commit, proposal, greedy, RoundLimits([3], 2))
    assert made.tokens[0, : int(made.count)].tolist() == wanted
    if isinstance(rule, Match):  # what is behind the first disagreement is never looked at
        assert penalise.seen == [[], *([OWN, *wanted[:size]] for size in range(len(wanted)))]


@pytest.mark.parametrize("acceptor", ["match", "reject"])
@pytest.mark.parametrize("penalty", [0.7, 1.5])
def test_rejected_drafts_leave_no_trace_in_later_rounds(penalty: float, acceptor: str) -> None:
    """Rule C28: round after round of drafts that the penalty comes to refuse."""
    asked = {"max_new_tokens": 24}
    made = []
    for source in (None, FunctionDrafter(lambda _: [LIKELY] * 3, 3)):
        one = SpeculativeGenerator(source, always(), k=3, acceptor=acceptor if source else "match")
        processor = FrequencyPenalty(penalty, prompt=1)
        made.append(one.sample([[BEGIN]], logits_processor=[processor], **asked)[0].tolist())  # type: ignore[arg-type, index]
    assert made[0] == made[1]
    assert {LIKELY, OTHER} <= set(made[0])


NEAR = 0.1
"""Logits of up to 6 that are no more apart than this count as a tie in bf16, whose last place is 0.03 there."""


def test_bf16_tokens_differ_from_other_kernels_only_at_near_ties(workshop: Workshop) -> None:
    """Rule C46: other kernels round otherwise (Hugging Face's, with our bf16 weights but an f32 cache), so an argmax
    may flip only where the two best are close. The logits are taken for our text, so that one flip does not hide the
    next.
    """
    judge = LlamaForCausalLM.from_pretrained(workshop.checkpoint("target"), dtype=torch.bfloat16).float()
    draft, target = workshop.pair(amp="bf16")
    result = run(SpeculativeGenerator(draft, target, k=4), {}, new=60)
    checked = 0
    for prompt, text in zip(PROMPTS, texts(result), strict=True):
        with torch.no_grad():
            logits = judge(torch.tensor([text]), use_cache=False).logits[0].float()
        for at in range(len(prompt), len(text)):
            line = logits[at - 1]
            assert float(line.max() - line[text[at]]) <= NEAR
            checked += 1
    assert checked == 4 * 60


@pytest.mark.parametrize("k", [1, 4])
def test_a_prompt_of_end_ids_is_continued(k: int) -> None:
    """Rule C48: an end id in the prompt ends nothing, even if the prompt holds nothing else."""
    drafts = FunctionDrafter(lambda text: [(text[-1] + step) % 16 for step in range(1, k + 1)], k)
    for source in (None, drafts):
        target = TableDecoder(torch.eye(16).roll(1, 1).expand(16, 16, 16) * 9, eos=(3,))
        made = SpeculativeGenerator(source, target, k=k).sample([[3, 3]], max_new_tokens=3)
        assert made[0].tolist() == [3, 3, 4, 5, 6]  # type: ignore[index]
