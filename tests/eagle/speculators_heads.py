"""Run with the interpreter that has speculators: write a random head, and what their own forward pass makes of a text.

    speculators_heads.py FOLDER INPUTS.safetensors SETTINGS.json

The inputs are a text (``tokens`` [S]), the target's residual streams at its positions (``features`` [S, F]), its
embedding, and the ids that are drafted. ``FOLDER/logits.safetensors`` gets ``logits`` [k, S - 1, U]: row i of step j is
the head's view of the token i + 2 + j after the features up to i and the tokens up to i + 1 + j (of the text, as in
training; P-EAGLE: up to i + 1).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses.eager import kl_div_loss
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.peagle import core as peagle
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config


def head_of(settings: dict[str, Any], inputs: dict[str, Tensor]) -> Any:
    """A head with random weights, none of them zero or one."""
    kind, size = settings["kind"], len(inputs["ids"])
    layer = (Qwen3Config if settings["qwen3"] else LlamaConfig)(**settings["layer"])
    layer._attn_implementation = "eager"
    made = PEagleSpeculatorConfig if kind == "peagle" else Eagle3SpeculatorConfig
    config = made(
        transformer_layer_config=layer,
        draft_vocab_size=size,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=settings["k"])],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **settings["head"],
    )
    model = (peagle.PEagleDraftModel if kind == "peagle" else Eagle3DraftModel)(config).eval()
    generator = torch.Generator().manual_seed(settings["seed"])
    with torch.no_grad():
        for name, x in model.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            x.copy_(torch.randn(x.shape, generator=generator) * (0.3 if x.dim() > 1 else 0.2) + mean)
        model.embed_tokens.weight.copy_(inputs["embedding"])
        if kind == "peagle":  # its embedding is trained
            model.embed_tokens.weight[config.mask_token_id] += 0.5
    mask = torch.zeros(layer.vocab_size, dtype=torch.bool)
    mask[inputs["ids"]] = True
    model.load_vocab_mappings(mask, inputs["ids"] - torch.arange(size))
    return model


def logits_of(model: Any, settings: dict[str, Any], inputs: dict[str, Tensor]) -> Tensor:
    """Their forward pass over the text, with what goes through its output layer."""
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0].detach()))
    tokens, states = inputs["tokens"][1:].unsqueeze(0), inputs["features"][:-1].unsqueeze(0)
    count, k, documents = tokens.shape[1], settings["k"], torch.zeros_like(tokens)
    if settings["kind"] != "peagle":
        model(states, tokens, documents, ttt_steps=k)
        return torch.stack(seen)
    # Training drops some of the positions by chance; here it keeps all that have a target.
    depths = torch.arange(k).repeat_interleave(torch.arange(count, count - k, -1))
    anchors = torch.cat([torch.arange(count - depth) for depth in range(k)])
    peagle.generate_cod_sample_indices = lambda **_: (anchors, depths)
    model.verifier_lm_head.weight.data.zero_()
    last, loss = torch.zeros(1, count, model.hidden_size), {"kl_div": (kl_div_loss, 1.0)}
    model(states, tokens, documents, verifier_last_hidden_states=last, num_depths=k, loss_config=loss)
    out = torch.full((k, count, seen[0].shape[-1]), torch.nan)
    out[depths, anchors] = seen[0]
    return out


def main() -> None:
    """Write the head and the logits."""
    folder, source, described = map(Path, sys.argv[1:])
    settings, inputs = json.loads(described.read_text()), load_file(source)
    model = head_of(settings, inputs)
    model.save_pretrained(folder)
    with torch.no_grad():
        save_file({"logits": logits_of(model, settings, inputs).contiguous()}, folder.parent / "logits.safetensors")


if __name__ == "__main__":
    main()
