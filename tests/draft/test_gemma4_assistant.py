"""Gemma 4's assistant: compared with transformers' module, over the keys and values of transformers' Gemma 4."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

from paceline import AutoDrafter, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.errors import CheckpointError, MissingWeightsError, PairingError, UnknownArchitectureError
from paceline.core.types import FeatureSpec
from paceline.decoder.steps import prefill
from paceline.draft.gemma4_assistant import AssistantDrafter
from tests.decoder.tiny import Workshop, fresh
from tests.draft.random_heads import (
    TREE,
    rounds,
    save_assistant,
    save_narrowed,
    simulated_rounds,
    simulated_tree_rounds,
)

PROMPTS = [[5, 17, 17, 90], [4], [33, 2, 9, *range(20, 45)]]
KINDS = {"gemma4": {}, "gemma4 moe": {"use_ordered_embeddings": True}}


class Oracle:
    """transformers' assistant, of which every draft reads the target's keys and values before the last token."""

    def __init__(self, model: Gemma4ForCausalLM, assistant: Gemma4AssistantForCausalLM) -> None:
        self.model, self.assistant = model, assistant

    @torch.inference_mode()
    def drafted(self, text: list[int], k: int, path: Sequence[int] = ()) -> tuple[list[int], list[Tensor]]:
        """Drafts that follow a text, the first ones those of ``path``, and their logits; the target has not read the
        text's last token.
        """
        read = self.model(torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
        state, token = read.hidden_states[-1][:, -1:], torch.tensor([text[-1:]])
        drafts: list[int] = []
        logits: list[Tensor] = []
        for _ in range(k):
            made = self.assistant(
                inputs_embeds=torch.cat([self.model.get_input_embeddings()(token), state], -1),
                position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=read.shared_kv_states,
            )
            drafts.append(path[len(drafts)] if len(drafts) < len(path) else int(made.logits.argmax()))
            state, token = made.last_hidden_state, torch.tensor([drafts[-1:]])
            logits.append(made.logits[0, 0])
        return drafts, logits


Made = tuple[SamplingDecoder, Path, Oracle]


@pytest.fixture(params=KINDS)
def made(request: pytest.FixtureRequest, workshop: Workshop, tmp_path: Path) -> Made:
    """A target, the folder of an assistant that transformers wrote, and what transformers computes."""
    source = save_narrowed(workshop.checkpoint(kind=request.param), tmp_path / "target")
    target = fresh(source, backend="native", batch_size=4)
    assistant = save_assistant(tmp_path / "assistant", target.config, **KINDS[request.param])
    return target, tmp_path / "assistant", Oracle(Gemma4ForCausalLM.from_pretrained(source).eval(), assistant)


def test_logits_equal_transformers_step_by_step(made: Made) -> None:
    target, folder, oracle = made
    for text in ([5, 17], PROMPTS[2]):
        drafts, wanted = oracle.drafted(text, 4)
        drafter = AutoDrafter.from_pretrained(folder, target, k=2)
        assert isinstance(drafter, AssistantDrafter)
        head, (_, states) = drafter.head, prefill(target, 0, text[:-1], reads=FeatureSpec())
        row, last = (torch.tensor([n], dtype=torch.int32) for n in (len(text) - 2, 0))
        place = head.place(row, 1, target.bucket_for(64))
        assert states is not None
        state = states[len(text) - 2].view(1, 1, -1)
        hidden = head.read(torch.tensor([text[-1:]]).int(), state, place, last=last)
        for token, logits in zip(drafts, wanted, strict=True):
            assert torch.allclose(head.logits(hidden)[0, 0], logits, atol=1e-4)
            hidden = head.next(torch.tensor([[token]]).int(), hidden, place)


@pytest.mark.parametrize("grown", [False, True], ids=["chain", "tree"])
def test_rounds_equal_a_simulation(made: Made, grown: bool) -> None:
    target, folder, oracle = made
    draft, begin = f"{folder}:{f'draft_tree={TREE}' if grown else 'k=3'}", len(PROMPTS[0]) + 1
    text, accepted = rounds(SpeculativeGenerator(draft, target), PROMPTS[0], 40)
    if grown:
        expected = simulated_tree_rounds(text, begin, lambda x, path: oracle.drafted(x, len(path) + 1, path)[1][-1])
    else:
        expected = simulated_rounds(text, begin, 3, lambda known: oracle.drafted(known, 3)[0])
    assert accepted[: len(expected)] == expected and 0 < sum(expected) < 3 * len(expected)
    assert text == target.sample(PROMPTS[:1], max_new_tokens=40)[0].tolist()


@pytest.mark.parametrize("form", ["int8", "fp8_e4m3"])
def test_rows_of_8_bits_stay_as_they_are(workshop: Workshop, tmp_path: Path, form: str) -> None:
    """Rounding a row's numbers again would change its scale now and then."""
    source = workshop.checkpoint(kind="gemma4")
    target = fresh(source, kv_cache_dtype=form)
    save_assistant(tmp_path, target.config)
    drafter, (_, states) = AutoDrafter.from_pretrained(tmp_path, target, k=2), prefill(target, 0, PROMPTS[2])
    assert isinstance(drafter, AssistantDrafter) and states is None
    before = [side.view(torch.uint8).clone() for pair in target.body.caches for side in pair]
    for row in range(len(PROMPTS[2])):
        at = torch.tensor([row], dtype=torch.int32)
        place = drafter.head.place(at, 1, target.bucket_for(64))
        drafter.head.next(at.view(1, 1), torch.ones(1, 1, target.config.hidden_size), place)
    after = [side.view(torch.uint8) for pair in target.body.caches for side in pair]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (
            {"backbone_hidden_size": 64},
            PairingError,
            "expected a target with hidden size 64 for this assistant, got 32",
        ),
        ({"head_dim": 10}, PairingError, "expected a Gemma 4 with 2 K/V heads of 10 in its layers with a window"),
        ({"num_kv_shared_layers": 1}, UnknownArchitectureError, "layers that all share keys and values"),
        (
            {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 96},
            UnknownArchitectureError,
            "without inputs of their own",
        ),
        ({"tie_word_embeddings": False}, UnknownArchitectureError, "tie_word_embeddings: expected true"),
        ({"num_heads_of_mine": 6}, UnknownArchitectureError, "'num_heads_of_mine' is not a known setting"),
        ({"text_config": None}, CheckpointError, "the key text_config is missing"),
        ({"num_centroids": 7}, CheckpointError, "num_centroids: expected a divisor of vocab_size = 96"),
        ({"intermediate_size": 44}, CheckpointError, "mlp.gate_proj.weight: expected shape"),
        ({"num_hidden_layers": 4, "layer_types": None}, UnknownArchitectureError, "all share"),
    ],
)
def test_keys_that_change_the_output_are_rejected_by_name(
    workshop: Workshop, tmp_path: Path, changes: dict[str, object], error: type[Exception], said: str
) -> None:
    target = workshop.decoder(kind="gemma4")
    save_assistant(tmp_path, target.config, use_ordered_embeddings=True)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"]
    (text if changes.keys() <= text.keys() - {"tie_word_embeddings"} else config).update(changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=said):
        SpeculativeGenerator(str(tmp_path), target, k=2)


def test_other_targets_and_incomplete_files_are_rejected(workshop: Workshop, tmp_path: Path) -> None:
    target = workshop.decoder(kind="gemma4")
    save_assistant(tmp_path, target.config, use_ordered_embeddings=True)
    with pytest.raises(PairingError, match=r"expected a Gemma 4 with .* got a llama with others"):
        AutoDrafter.from_pretrained(tmp_path, workshop.decoder(), k=2)
    tensors = load_file(file := tmp_path / "model.safetensors")
    order = tensors.pop("masked_embedding.token_ordering")
    for wrong in ({}, {"masked_embedding.token_ordering": order * 0}):
        save_file({**tensors, **wrong}, file)
        with pytest.raises(CheckpointError, match="token_ordering: expected every id below 96 once"):
            AutoDrafter.from_pretrained(tmp_path, target, k=2)
    save_file({name: x for name, x in tensors.items() if "pre_proj" not in name}, file)
    with pytest.raises(MissingWeightsError, match=r"pre_projection\.weight"):
        AutoDrafter.from_pretrained(tmp_path, target, k=2)
