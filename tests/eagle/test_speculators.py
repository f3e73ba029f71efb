"""Heads that speculators wrote, by their own forward pass: logits of every step, and what a greedy text accepts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.auto_drafter import AutoDrafter
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import FeatureSpec
from paceline.decoder.steps import prefill
from paceline.eagle.drafter import EagleDrafter
from tests.decoder.tiny import POSITIONS, VOCABULARY, Workshop
from tests.heads.test_speculators import needs_speculators, run_script

pytestmark = needs_speculators

PROMPT, NEW, K = [(70 + i * i) % VOCABULARY for i in range(9)], 80, 4
"""A prompt whose text repeats itself: three ids are more than half of it."""
MASK = 94


@dataclass(frozen=True)
class Case:
    """A head to write. ``head``: of its config; ``layer``: of the decoder layer's, beyond the target's sizes."""

    kind: str = "eagle3"
    qwen3: bool = False
    head: dict[str, object] = field(default_factory=dict)
    layer: dict[str, object] = field(default_factory=dict)


CASES = {
    "EAGLE-3": Case(),
    "norm_before_residual, biases": Case(
        head={"norm_before_residual": True}, layer={"attention_bias": True, "mlp_bias": True}
    ),
    "EAGLE-3.1": Case(head={"fc_norm": True, "norm_output": True, "norm_before_residual": True}),
    "norm_before_fc, three layers": Case(
        head={"norm_before_fc": True, "norm_output": True}, layer={"num_hidden_layers": 3}
    ),
    "layers of Qwen3": Case(qwen3=True, head={"fc_norm": True}, layer={"num_hidden_layers": 2}),
    "P-EAGLE": Case("peagle", head={"mask_token_id": MASK}, layer={"num_hidden_layers": 2}),
    "P-EAGLE, layers of Qwen3, all norms": Case(
        "peagle",
        qwen3=True,
        head={"mask_token_id": MASK, "fc_norm": True, "norm_output": True, "norm_before_residual": True},
    ),
}


@dataclass
class Written:
    """A text of the target, a head that speculators wrote for it, and their logits of its drafts [k, S - 1, U]."""

    text: list[int]
    features: Tensor
    ids: Tensor
    folder: Path
    logits: Tensor

    def drafts(self) -> Tensor:
        """Their greedy choices, as ids of the target. [k, S - 1]"""
        return self.ids[self.logits.nan_to_num(-1e9).argmax(-1)]


def written(target: SamplingDecoder, case: Case, folder: Path, *, seed: int = 1) -> Written:
    text = target.sample([PROMPT], max_new_tokens=NEW, eos_token_id=[])[0].tolist()
    features = prefill(target, 0, text, reads=FeatureSpec((0, 1, 2)))[1]
    assert features is not None
    # Few ids, the most frequent of the text: a random head is then right often enough for counts that say something.
    ids = torch.tensor(text[len(PROMPT) :]).bincount(minlength=VOCABULARY).topk(3).indices.sort().values
    sizes = target.config
    layer = {
        "vocab_size": sizes.vocab_size, "hidden_size": sizes.hidden_size, "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": sizes.num_heads, "num_key_value_heads": sizes.num_kv_heads, "head_dim": sizes.head_dim,
        "max_position_embeddings": POSITIONS, "num_hidden_layers": 1, **case.layer,
    }  # fmt: skip
    head = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], **case.head}
    settings = {"kind": case.kind, "qwen3": case.qwen3, "k": K, "seed": seed, "layer": layer, "head": head}
    embedding = target.body.model.embedding.detach().float().clone()
    inputs = {"tokens": torch.tensor(text), "features": features.float(), "embedding": embedding, "ids": ids}
    save_file({name: x.contiguous() for name, x in inputs.items()}, folder / "inputs.safetensors")
    (folder / "settings.json").write_text(json.dumps(settings))
    script = Path(__file__).with_name("speculators_heads.py")
    run_script(script, folder / "head", folder / "inputs.safetensors", folder / "settings.json")
    return Written(text, features, ids, folder / "head", load_file(folder / "logits.safetensors")["logits"])


@pytest.mark.parametrize("name", CASES)
def test_a_speculators_head_equals_its_own_forward(workshop: Workshop, tmp_path: Path, name: str) -> None:
    """Every step after a text of every length, and the drafts accepted in every round."""
    target = workshop.decoder(slots=1)
    found = written(target, CASES[name], tmp_path)
    made = AutoDrafter.from_pretrained(found.folder, target, k=K)
    assert isinstance(made, EagleDrafter)
    for length in range(len(PROMPT), len(found.text) - K - 1, 7):
        torch.testing.assert_close(steps(made, found, length), found.logits[:, length - 1], rtol=1e-4, atol=1e-4)

    rounds = [
        output
        for output in SpeculativeGenerator(made, target).stream([PROMPT], max_new_tokens=NEW, eos_token_id=[])
        if output.tokens
    ]
    assert [token for output in rounds for token in output.tokens] == found.text[len(PROMPT) :]
    wanted = simulated(found)
    assert sum(wanted) > 4, "equality shows nothing where no draft is accepted"
    assert [output.accepted for output in rounds[1:]] == wanted, "the first is the prompt's"


def steps(made: EagleDrafter, found: Written, length: int) -> Tensor:
    """The head's logits of K drafts after ``length`` tokens and their successor, given the text's own drafts. [k, U]"""
    head, text = made.head, found.text
    made.add_request(0, text[:length], found.features)
    one, row = torch.ones(1, dtype=torch.int32), torch.tensor([length - 1], dtype=torch.int32)
    token, real = torch.tensor([[text[length]]], dtype=torch.int32), found.features[length - 1].view(1, 1, -1)
    if head.config.mask_token is not None:
        place = head.place(row, K, POSITIONS)
        hidden = head.ahead(token, one, real, place=place, k=K, sampling=sampling_tensors([Sampling()]))
        return head.scores(hidden)[0]
    hidden = head.read(token, real, head.place(row, 1, POSITIONS), last=one - 1)
    scores = [head.scores(hidden)[0, 0]]
    for ahead in range(1, K):
        place = head.place(row + ahead, 1, POSITIONS)
        hidden = head.next(torch.tensor([[text[length + ahead]]], dtype=torch.int32), hidden, place)
        scores.append(head.scores(hidden)[0, 0])
    return torch.stack(scores)


def simulated(found: Written) -> list[int]:
    """Drafts accepted in every round of the text: those before the first that is not the text's own."""
    drafts, text, counts = found.drafts(), found.text, []
    at = len(PROMPT)  # of the token that the last round ended with, which the next one reads first
    while at + 1 < len(text):
        left = len(text) - at - 1
        right = [int(drafts[j, at - 1]) == text[at + 1 + j] for j in range(min(K, left))]
        count = next((j for j, same in enumerate(right) if not same), len(right))
        counts.append(count)
        at += count + 1
    return counts
