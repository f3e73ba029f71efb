"""Write random DFlash, DFlash 2 and DSpark heads with speculators, and what its modules draft at every place of a text.

Run by an interpreter that has speculators: ``write_block_heads.py TEXT OUT``. TEXT is a file of tensors: the tokens
of a text, the target's states at the streams that heads read, its embedding and its output layer. OUT gets a folder for
each case, with the head and, in ``oracle.safetensors``, drafts [S, k] and logits [S, k, V] after each number of tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

BLOCK, MASK, NOTHING = 6, 7, -1.0e30
FULL, SLIDES = ["full_attention"] * 2, ["sliding_attention", "full_attention"]
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dflash": (DFlashDraftModel, DFlashSpeculatorConfig, {}),
    "dflash, some ids": (DFlashDraftModel, DFlashSpeculatorConfig, {"draft_vocab_size": 40}),
    "dflash, anchor": (DFlashDraftModel, DFlashSpeculatorConfig, {"sample_from_anchor": True}),
    "dflash, causal": (DFlashDraftModel, DFlashSpeculatorConfig, {"layer_types": SLIDES}),
    "dflash2": (
        DFlash2DraftModel,
        DFlash2SpeculatorConfig,
        {"layer_types": SLIDES, "conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5},
    ),
    **{
        f"dspark, {kind}": (DSparkDraftModel, DSparkSpeculatorConfig, {"markov_rank": 6, "markov_head_type": kind})
        for kind in ("vanilla", "gated", "rnn")
    },
    "dspark, some ids": (
        DSparkDraftModel,
        DSparkSpeculatorConfig,
        {"markov_rank": 6, "draft_vocab_size": 40, "sample_from_anchor": False},
    ),
}


def model(case: str, given: dict[str, torch.Tensor]) -> Any:
    made, config, own = CASES[case]
    options = dict(own)
    vocabulary, width = given["embedding"].shape
    layers = Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, layer_types=options.pop("layer_types", FULL),
        use_sliding_window=True, sliding_window=100, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    layers._attn_implementation = "eager"
    verifier = VerifierConfig(name_or_path="", architectures=["LlamaForCausalLM"])
    speculators = SpeculatorsConfig(
        algorithm=config.model_fields["speculators_model_type"].default,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
        default_proposal_method="greedy",
        verifier=verifier,
    )
    options.setdefault("draft_vocab_size", vocabulary)
    head = made(
        config(
            transformer_layer_config=layers,
            block_size=BLOCK,
            mask_token_id=MASK,
            aux_hidden_state_layer_ids=given["streams"].tolist(),
            speculators_config=speculators,
            **options,
        )
    ).eval()
    torch.manual_seed(len(case))
    for name, parameter in head.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    head.embed_tokens.weight.data.copy_(given["embedding"])
    if head.use_draft_vocab:
        ids = torch.randperm(vocabulary)[: options["draft_vocab_size"]].sort().values
        head.d2t.copy_(ids - torch.arange(len(ids)))
        head.t2d.zero_()[ids] = True
    else:
        head.lm_head.weight.data.copy_(given["head"])
    head.verifier_lm_head.weight.data.zero_()
    return head


@torch.no_grad()
def drafted(head: Any, given: dict[str, torch.Tensor], last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts [k] and logits [k, V] after the token at position ``last``."""
    text, states = given["text"][None], given["states"][None]
    after = torch.zeros(1, 2 * BLOCK, dtype=text.dtype)  # the anchor may not be among the last tokens
    text, states = torch.cat([text, after], 1), torch.nn.functional.pad(states, (0, 0, 0, 2 * BLOCK))
    states[:, last:] = 99.0  # never looked at
    mask = torch.zeros(text.shape)
    mask[0, last] = 1
    size = given["embedding"].shape[1]
    documents, nothing = torch.zeros_like(text), torch.zeros(1, text.shape[1], size)
    hidden, logits, *_ = head._backbone_forward(states, text, mask, nothing, documents, max_anchors=1)
    anchored = head.config.sample_from_anchor
    hidden, logits = (x[0] if anchored else x[0, 1:] for x in (hidden, logits))
    ids = torch.arange(given["embedding"].shape[0])
    if head.use_draft_vocab:
        ids = torch.arange(len(head.d2t)) + head.d2t
    markov, select = getattr(head, "markov_head", None), getattr(head, "candidate_selector", None)
    chosen, scores = [text[0, last]], []
    for place in range(len(hidden)):
        row = torch.full((given["embedding"].shape[0],), NOTHING)
        if select is not None:
            candidates, found = select.select(logits[None, place], hidden[None, place], chosen[-1][None])
            row[candidates[0]] = found[0]
        elif markov is not None:
            count = place + 1
            before = torch.stack(chosen)[None]
            bias = markov.block_bias(prev_token_ids=before, hidden_states=hidden[None, :count])
            row[ids] = logits[place] + bias[0, -1]
        else:
            row[ids] = logits[place]
        scores.append(row)
        chosen.append(row.argmax())
    return torch.stack(chosen[1:]), torch.stack(scores)


def main(text: Path, out: Path) -> None:
    given = load_file(text)
    for case in CASES:
        head = model(case, given)
        head.save_pretrained(out / case)
        found = [drafted(head, given, last) for last in range(1, len(given["text"]))]
        drafts, logits = (torch.stack(parts).contiguous() for parts in zip(*found, strict=True))
        save_file({"drafts": drafts, "logits": logits}, out / case / "oracle.safetensors")


main(*map(Path, sys.argv[1:]))
