"""PARD: its drafts are those of the published loop, computed by transformers, and change no token.

The reference reads the whole text and its mask tokens again in every round, as pard/pard_infer.py of
https://github.com/AMD-AIG-AIMA/PARD at 5dfe809 does over a cache: ids, then k - 1 mask tokens, causal, k last logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline import AutoDrafter, SpeculativeGenerator
from paceline.core.errors import CheckpointError, ConfigurationError, PacelineError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.draft.model import ModelDrafter
from paceline.draft.pard import PardDrafter, mask_token
from paceline.draft_checks import recognise
from tests.decoder.tiny import Workshop
from tests.sampled import run, texts

MASK, K, NEW = 7, 4, 24
PROMPTS = [[5, 9, 5, 9, 5], [17], [(7 * i) % 80 for i in range(35)]]


@pytest.fixture
def folder(workshop: Workshop, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A draft model with the keys of a PARD checkpoint; of another family where a test asks for one."""
    kind = getattr(request, "param", "grouped")
    for file in workshop.checkpoint("draft", kind).iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "pard_token": MASK, "spd_type": "pard"}))
    return tmp_path


@torch.no_grad()
def accepted_by_reference(folder: Path, text: list[int], start: int) -> list[int]:
    """Accepted drafts of every round over a known text, whose first ``start`` tokens are the prompt and one more."""
    model, found = AutoModelForCausalLM.from_pretrained(folder).eval(), list[int]()
    while start < len(text):
        window = torch.tensor([text[:start] + [MASK] * (K - 1)])
        drafts = model(window).logits[0, -K:].argmax(-1).tolist()
        count = 0
        while count < min(K, len(text) - start - 1) and drafts[count] == text[start + count]:
            count += 1
        found.append(count)
        start += count + 1
    return found


@pytest.mark.parametrize("folder", ["grouped", "qwen3 slides"], indirect=True)
def test_acceptance_equals_the_published_pard_loop(
    folder: Path, workshop: Workshop, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["folder"]
    target = workshop.decoder(kind=kind, slots=1)
    plain = texts(run(target, PROMPTS[:1], max_new_tokens=NEW))[0]
    generator = SpeculativeGenerator(str(folder), target, k=K)
    assert isinstance(generator.drafter, PardDrafter)
    rounds = [one.accepted for one in generator.stream(PROMPTS[:1], max_new_tokens=NEW)][1:]
    wanted = accepted_by_reference(folder, plain, len(PROMPTS[0]) + 1)
    assert rounds == wanted and sum(wanted)


def test_a_pard_folder_is_recognised_and_a_name_overrides_it(folder: Path, workshop: Workshop) -> None:
    target = workshop.decoder()
    assert recognise(str(folder)) == "pard"
    assert isinstance(AutoDrafter.from_pretrained(folder, target, k=2), PardDrafter)
    decoder = workshop.decoder("draft")
    for draft, kind in (
        ({"type": "model", "path": str(folder)}, ModelDrafter),
        ({"type": "pard", "path": str(folder)}, PardDrafter),
        (decoder, ModelDrafter),
    ):
        assert type(SpeculativeGenerator(draft, target, k=2).drafter) is kind
    with pytest.raises(CheckpointError, match="'pard_token' is missing"):
        SpeculativeGenerator({"type": "pard", "path": str(workshop.checkpoint("draft"))}, target, k=2)


def test_a_pard_draft_beyond_its_length_is_rejected(folder: Path, workshop: Workshop) -> None:
    with pytest.raises(ConfigurationError, match="k: expected at most 64 for a PARD draft"):
        SpeculativeGenerator(str(folder), workshop.decoder(), k=65)


LLAMA = {"model_type": "llama", "vocab_size": 128256, "pard_token": 128020}
"""What `pard_train.py` adds to the model that it starts from, with the token of config/train/example_llama3.yaml."""


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"pard_token": None}, CheckpointError, "'pard_token' is missing"),
        ({"pard_token": -1}, CheckpointError, "pard_token: expected an integer of at least 0, got -1"),
        ({"pard_token": 128256}, CheckpointError, "pard_token: expected an id below the vocabulary size 128256"),
        ({"spd_type": "pard2"}, UnknownArchitectureError, "spd_type: expected 'pard', got 'pard2'"),
        ({"pard2_target_dim": 4096}, UnknownArchitectureError, "keys of PARD-2"),
    ],
)
def test_pard_keys_are_read_or_rejected_by_name(
    changes: dict[str, Any], error: type[PacelineError], said: str, tmp_path: Path
) -> None:
    where = str(tmp_path / "config.json")
    assert mask_token(Fields(LLAMA, where)) == mask_token(Fields({**LLAMA, "spd_type": "pard"}, where)) == 128020
    with pytest.raises(error, match=said):
        mask_token(Fields({**LLAMA, **changes}, where))
    (tmp_path / "warp_model.bin").touch()
    with pytest.raises(UnknownArchitectureError, match="got warp_model"):
        mask_token(Fields(LLAMA, where))


def test_acceptance_of_a_tree_equals_that_of_the_best_tokens_of_each_position(folder: Path, workshop: Workshop) -> None:
    """Node by node: its token is the one of its rank at its position, by a pass over the whole text."""
    parents, ranks, depths = (-1, -1, 0, 0, 1, 2), (0, 1, 0, 1, 0, 0), (0, 0, 1, 1, 1, 2)
    target, model = workshop.decoder(slots=1), AutoModelForCausalLM.from_pretrained(folder).eval()
    plain = texts(run(target, PROMPTS[:1], max_new_tokens=NEW))[0]
    generator = SpeculativeGenerator(f"{folder}:draft_tree=tree:{','.join(map(str, parents))}", target)
    found = [one.accepted for one in generator.stream(PROMPTS[:1], max_new_tokens=NEW)][1:]
    assert texts(run(generator, PROMPTS[:1], max_new_tokens=NEW))[0] == plain
    wanted, start = list[int](), len(PROMPTS[0]) + 1
    while start < len(plain):
        with torch.no_grad():
            best = model(torch.tensor([plain[:start] + [MASK] * 2])).logits[0, -3:].topk(2).indices.tolist()
        right, left = {-1}, min(3, len(plain) - start - 1)
        for node, (parent, rank, depth) in enumerate(zip(parents, ranks, depths, strict=True)):
            if parent in right and depth < left and best[depth][rank] == plain[start + depth]:
                right.add(node)
        wanted.append(max([0, *(depths[node] + 1 for node in right if node >= 0)]))
        start += wanted[-1] + 1
    assert found == wanted and sum(wanted)
    with pytest.raises(ConfigurationError, match="confidence_threshold: expected 0 for a draft of trees"):
        SpeculativeGenerator(f"{folder}:draft_tree=tree:-1,-1", target, confidence_threshold=0.5)
