"""DFlash heads: the drafts of transformers' own generator, no other token than plain decoding's, and refusals."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from paceline import AutoDrafter, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.errors import (
    CheckpointError,
    ConfigurationError,
    MissingWeightsError,
    PacelineError,
    PairingError,
    UnknownArchitectureError,
)
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft_checks import recognise
from tests.decoder.tiny import VOCABULARY, Workshop, fresh, network
from tests.draft.block_heads import BLOCK, MASK, VARIANTS, accepted, drafter, fields, rounds, tensors, write
from tests.sampled import run

PROMPTS = [[5, 9, 5, 9, 5], [17], [(7 * i) % 80 for i in range(35)]]
NEW = 24
UNKNOWN = UnknownArchitectureError


def assistant(folder: Path, **changes: object) -> MuseGlimmerAssistantModel:
    """A random head of transformers for a tiny target of four layers."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    block = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [0, 2]}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    made = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(**{**sizes, **heads, **block, **special, **changes})
    ).eval()
    for name, parameter in made.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    made.save_pretrained(folder)
    return made


@torch.no_grad()
def generated(target: LlamaForCausalLM, head: MuseGlimmerAssistantModel, text: list[int], start: int) -> list[Any]:
    """Drafts and logits of every round that transformers makes over a known greedy text, from ``start`` tokens on."""
    streams = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    tables, settings = (target.get_input_embeddings(), target.get_output_embeddings()), {"do_sample": False}
    generator = DFlashTokenCandidateGenerator(head, *tables, GenerationConfig(max_length=len(text) + 99, **settings))
    found: list[Any] = []
    read, matches = 0, 0
    while start < len(text):
        ids = torch.tensor([text[:start]])
        outputs = SimpleNamespace(hidden_states=[one[:, read : start - 1] for one in streams])
        seen = {"position_ids": torch.arange(start)[None], "attention_mask": None}
        drafts, logits = generator.get_candidates(
            ids, seen, model_outputs=outputs, is_first_iteration=False, n_last_matches=matches
        )
        found.append((drafts[0, start:].tolist(), logits[0]))
        matches = accepted(text, start, found[-1][0])
        read, start = start - 1, start + matches + 1
    return found


@pytest.mark.parametrize("first", ["full_attention", "sliding_attention"])
def test_dflash_drafts_equal_transformers_in_every_round(tmp_path: Path, first: str) -> None:
    model = network(layers=4)
    model.save_pretrained(tmp_path / "target")
    window = {"sliding_window": 9} if first == "sliding_attention" else {}
    head = assistant(tmp_path / "head", layer_types=[first, "full_attention"], **window)
    target = fresh(tmp_path / "target", backend="eager", amp="f32")
    made = DFlashDrafter.from_pretrained(tmp_path / "head", target, BLOCK - 1)
    text, own = rounds(made, target, PROMPTS[2], NEW)
    theirs = generated(model, head, text, len(PROMPTS[2]) + 1)
    assert len(theirs) - len(own) in (0, 1) and len(own) > 3, "nothing is drafted for the last token"
    for (drafts, logits), (wanted, scores) in zip(own, theirs, strict=False):
        assert drafts == wanted
        torch.testing.assert_close(logits, scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_do_not_depend_on_how_many_tokens_were_committed_at_once(
    workshop: Workshop, tmp_path: Path, variant: str
) -> None:
    """The cache is that of one pass over the text: rounds that accept nothing leave what others leave."""
    target = workshop.decoder(slots=1, backend="eager")
    made = drafter(tmp_path, target, variant, 4)
    text, own = rounds(made, target, PROMPTS[2], NEW)
    start = len(PROMPTS[2]) + 1
    for number, (drafts, logits) in enumerate(own):
        if number % 5 == 4:
            _, again = rounds(made, target, text[: start - 1], 8)
            assert again[0][0] == drafts
            torch.testing.assert_close(again[0][1], logits, rtol=1e-4, atol=1e-4)
        start += accepted(text, start, drafts) + 1


def test_native_and_eager_give_the_same_dflash_drafts(workshop: Workshop, tmp_path: Path) -> None:
    for variant in VARIANTS:
        seen = []
        for backend in ("native", "eager"):
            made = drafter(tmp_path, workshop.decoder(slots=4, backend=backend), variant, 5)
            found = run(SpeculativeGenerator(made, made.decoder), PROMPTS, max_new_tokens=NEW)
            seen.append(found.statistics.num_accepted_tokens_per_pos)
        assert seen[0] == seen[1]


def test_a_dflash_folder_is_recognised(workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = workshop.decoder()
    folder = drafter(tmp_path, target, "DFlash", 2) and tmp_path
    caplog.set_level(logging.INFO, "paceline")
    assert recognise(str(folder)) == "dflash"
    assert "reads residual streams" not in caplog.text
    made = AutoDrafter.from_pretrained(folder, target)
    assert isinstance(made, DFlashDrafter) and made.draft_shape.depth == 4
    assert "the head reads residual streams [0, 1] of the target" in caplog.text
    for k, depth in ((3, 3), (BLOCK - 1, BLOCK - 1), ("auto", BLOCK - 1)):
        assert AutoDrafter.from_pretrained(folder, target, k=k).draft_shape.depth == depth
    quantized = AutoDrafter.from_pretrained(folder, target, quantization="int8")
    assert isinstance(quantized, DFlashDrafter) and quantized.head.form is not None
    with pytest.raises(ConfigurationError, match=r"k: expected a draft depth of 8 for .*, got 9; use 1 to 8"):
        AutoDrafter.from_pretrained(folder, target, k=BLOCK)
    with pytest.raises(ConfigurationError, match="quantization: expected"):
        AutoDrafter.from_pretrained(folder, target, quantization="int3")
    with pytest.raises(ConfigurationError, match="cannot be in a list of drafters"):
        SpeculativeGenerator(["ngram", str(folder)], target)


def test_a_heads_separate_embedding_and_output_layer_are_used(workshop: Workshop, tmp_path: Path) -> None:
    """Copies of the target's are shared; other ones, and an output layer of fewer ids, are not."""
    target = workshop.decoder(slots=1, backend="eager")
    told = fields(target, "DFlash")
    weights, model = tensors(target, told), target.body.model
    copies = {"embed_tokens.weight": model.embedding.detach().clone(), "lm_head.weight": model.head.detach().clone()}
    made = DFlashDrafter.from_pretrained(write(tmp_path / "copies", told, {**weights, **copies}), target)
    assert made.head.embedding is model.embedding and made.head.output is model.head
    others = {name: x + 0.1 for name, x in copies.items()}
    made = DFlashDrafter.from_pretrained(write(tmp_path / "others", told, {**weights, **others}), target)
    assert torch.equal(made.head.output, others["lm_head.weight"])
    assert torch.equal(made.head.embedding, others["embed_tokens.weight"])
    ids = torch.arange(0, VOCABULARY, 3)
    few = {"lm_head.weight": model.head.detach()[ids].clone(), "d2t": ids - torch.arange(len(ids))}
    folder = write(tmp_path / "few", {**told, "draft_vocab_size": len(ids)}, {**weights, **few})
    _, own = rounds(DFlashDrafter.from_pretrained(folder, target), target, PROMPTS[0], 8)
    assert all(token % 3 == 0 for drafts, _ in own for token in drafts)


def told(target: SamplingDecoder, **changes: object) -> dict[str, Any]:
    inner = changes.pop("dflash_config", {})
    made = fields(target, "DFlash", **changes)
    return {**made, "dflash_config": {**made["dflash_config"], **inner}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"hidden_size": 64}, PairingError, "expected a target with hidden size 64"),
        ({"vocab_size": 90}, PairingError, "expected a target with vocabulary 90"),
        ({"num_target_layers": 7}, PairingError, "expected a target of 7 layers"),
        ({"hidden_act": "gelu"}, UNKNOWN, 'hidden_act: expected "silu", got "gelu"'),
        ({"mlp_bias": True}, UNKNOWN, "mlp_bias: expected false, got true"),
        ({"attention_sink_bias": True}, UNKNOWN, "attention_sink_bias: expected false, got true"),
        ({"aux_gate": 3}, UNKNOWN, "'aux_gate' is not a known setting of a DFlash head"),
        ({"layer_types": ["full_attention", "x"]}, UNKNOWN, "layer_types: expected full_attention or sliding"),
        ({"mask_token_id": 8}, CheckpointError, "mask_token_id: expected the same value at the top level"),
        ({"draft_vocab_size": 9999}, CheckpointError, "draft_vocab_size up to, vocab_size"),
        ({"block_size": 1, "dflash_config": {"block_size": 1}}, CheckpointError, "block_size: expected an integer of"),
        ({"dflash_config": {"mask_token_id": VOCABULARY}}, CheckpointError, "expected mask_token_id below"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, UNKNOWN, "expected layers before the last"),
        ({"dflash_config": {"target_layer_ids": []}}, CheckpointError, "expected a list of layer numbers from -1"),
        ({"dflash_config": {"use_swa": True}}, UNKNOWN, "use_swa: expected false, got true"),
        ({"dflash_config": {"causal": True}}, UNKNOWN, "causal: expected false, got true"),
        ({"dflash_config": {"linear_context": {}}}, UNKNOWN, "dflash_config: 'linear_context' is not a known"),
        ({"markov_rank": 4, "markov_head_type": "lstm"}, UNKNOWN, "markov_head_type: expected vanilla, gated or rnn"),
        ({"dflash_config": {"conv_kernel_size": 2}}, CheckpointError, "'conv_group_size' is missing"),
        ({"dflash_config": {"conv_kernel_size": 2, "conv_group_size": 5}}, CheckpointError, "to divide hidden_size"),
        ({"dflash_config": {"selector_rank": 4, "selector_top_k": 97}}, CheckpointError, "at most vocab_size = 96"),
        ({"markov_rank": 4}, MissingWeightsError, "expected the tensors markov_head.markov_w1.weight"),
        ({"num_hidden_layers": 1, "layer_types": None}, CheckpointError, "got also layers.1"),
        ({"quantization_config": {"quant_method": "awq"}}, CheckpointError, "quantization_config"),
    ],
)
def test_unsupported_dflash_keys_are_rejected_by_name(
    workshop: Workshop, tmp_path: Path, changes: dict[str, Any], error: type[PacelineError], said: str
) -> None:
    target = workshop.decoder()
    weights = tensors(target, told(target))
    with pytest.raises(error, match=said):
        AutoDrafter.from_pretrained(write(tmp_path, told(target, **changes), weights), target)


def test_other_tensor_names_and_harmless_tensors_are_accepted(workshop: Workshop, tmp_path: Path) -> None:
    target = workshop.decoder(slots=1, backend="eager")
    plain = drafter(tmp_path / "plain", target, "DFlash 2", 4)
    made = load_file(tmp_path / "plain" / "model.safetensors")
    renamed: dict[str, Tensor] = {"verifier_norm.weight": torch.ones(3)}
    for name, x in made.items():
        renamed["model." + (f"{name}.weight" if name.endswith("codebook") else name)] = x
    (tmp_path / "other").mkdir()
    save_file(renamed, tmp_path / "other" / "model.safetensors")
    (tmp_path / "other" / "config.json").write_text(json.dumps(fields(target, "DFlash 2")))
    other = DFlashDrafter.from_pretrained(tmp_path / "other", target, 4)
    assert other.head.config == plain.head.config
    one, two = (rounds(each, target, PROMPTS[0], 12)[1] for each in (plain, other))
    assert [drafts for drafts, _ in one] == [drafts for drafts, _ in two]
    assert replace(other.head.config, block_size=9).most == 8


TREE = "tree:-1,-1,-1,0,0,1,3"


@pytest.mark.parametrize("variant", ["DFlash", "DSpark"])
def test_nodes_of_a_tree_are_the_best_tokens_of_each_position(workshop: Workshop, tmp_path: Path, variant: str) -> None:
    """DSpark ranks a position by the first tokens of those before it, as in its chain."""
    target = workshop.decoder(backend="eager", slots=1)
    tree, chain = (
        rounds(drafter(tmp_path / variant, target, variant, 3, draft_tree=form), target, [5, 17, 17, 90], 6)
        for form in (TREE, "chain")
    )
    assert tree[0] == chain[0]
    for tokens, logits in tree[1]:
        best = logits.topk(3).indices.tolist()
        assert tokens == [*best[0], best[1][0], best[1][1], best[1][0], best[2][0]]
    assert torch.equal(tree[1][0][1], chain[1][0][1]) and tree[1][0][0][0] == chain[1][0][0][0]


@pytest.mark.parametrize(
    ("draft_tree", "acceptor", "said"),
    [
        ("dynamic:6,3,3", "match", "draft_tree: expected 'chain' or 'tree:PARENTS'"),
        ("tree:0", "match", "tree: expected -1"),
        ("tree:-1,-1,k=3", "match", "k: expected a draft depth of 1"),
        (f"tree:{','.join(map(str, range(-1, 11)))}", "match", "k: expected 1 to 8 for this DFlash head"),
        (TREE, "reject", "draft_tree: expected 'chain' for acceptor='reject'"),
    ],
)
def test_a_tree_that_does_not_fit_is_refused_before_loading(
    workshop: Workshop, tmp_path: Path, draft_tree: str, acceptor: str, said: str
) -> None:
    target = workshop.decoder(slots=1)
    drafter(tmp_path, target, "DFlash", 3)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=said):
        SpeculativeGenerator(f"{tmp_path}:draft_tree={draft_tree}", target, acceptor=acceptor)
