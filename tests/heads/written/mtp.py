"""Write a random MTP head with speculators for a tiny Qwen3, and what its own modules compute; run in its environment.

python mtp.py FOLDER    writes FOLDER/target, FOLDER/head and FOLDER/expected.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config, Qwen3ForCausalLM

DRAFTS, PROMPT, NEW, FREQUENT = 3, [5, 17, 17, 90], 40, 6


def random_target(folder: Path) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    config.eos_token_id = config.bos_token_id = None
    model = Qwen3ForCausalLM(config).eval()
    randomise(model)
    model.lm_head.weight.data[FREQUENT:] *= 0.05  # few ids, so that a random head is right now and then
    model.save_pretrained(folder)
    return model


def randomise(module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)


def random_head(target: Path, folder: Path) -> MTPDraftModel:
    config = MTPSpeculatorConfig(
        transformer_layer_config=Qwen3Config.from_pretrained(target),
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DRAFTS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(target)),
        ),
    )
    model = MTPDraftModel(config)
    randomise(model.mtp_layers)
    model.save_pretrained(folder)  # with an output layer that is not used, as its converter leaves it
    loaded = MTPDraftModel.from_pretrained(folder).eval()  # takes the tables of the target
    assert isinstance(loaded, MTPDraftModel)
    return loaded


@torch.no_grad()
def drafted(target: Qwen3ForCausalLM, head: MTPDraftModel, text: list[int]) -> tuple[list[int], list[list[float]]]:
    """Drafts after a text whose last token the target has not read, and their logits, by passes over all pairs."""
    states = target.model(torch.tensor([text[:-1]])).last_hidden_state
    tokens, drafts, logits = text[1:], [], []
    for _ in range(DRAFTS):
        size = len(tokens)
        at = torch.arange(size).unsqueeze(0)
        causal = torch.full((1, 1, size, size), float("-inf")).triu(1)
        output = head.mtp_layers[0](
            hidden_states=states,
            token_embeddings=head.embed_tokens(torch.tensor([tokens])),
            attention_mask=causal,
            position_ids=at,
            position_embeddings=head.rotary_emb(states, at),
        )
        last = output[:, -1:]
        logits.append(head.lm_head(last)[0, 0].tolist())
        drafts.append(max(range(len(logits[-1])), key=logits[-1].__getitem__))
        tokens, states = [*tokens, drafts[-1]], torch.cat([states, last], 1)
    return drafts, logits


@torch.no_grad()
def main(folder: Path) -> None:
    torch.manual_seed(3)
    target = random_target(folder / "target")
    head = random_head(folder / "target", folder / "head")
    text = target.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)[0].tolist()
    begin, accepted, logits = len(PROMPT) + 1, [], []
    while begin + DRAFTS <= len(text):
        drafts, scores = drafted(target, head, text[:begin])
        right = next((i for i, token in enumerate(drafts) if token != text[begin + i]), DRAFTS)
        accepted.append(right)
        logits.append({"text": text[:begin], "drafts": drafts, "logits": scores})
        begin += right + 1
    # Its own forward pass, teacher-forced: the first step has the logits of our first draft at every position.
    states = target.model(torch.tensor([text])).last_hidden_state
    forward = head(input_ids=torch.tensor([text]), hidden_states=states)[0][0][0].tolist()
    expected = {"text": text, "accepted": accepted, "rounds": logits, "forward": forward}
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
