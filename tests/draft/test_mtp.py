"""MTP layers as heads: compared with transformers' `MtpModel`, and with targets whose checkpoints hold them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from paceline import AutoDrafter, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.errors import CheckpointError, MissingWeightsError, PairingError, UnknownArchitectureError
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.registry import MODEL_FAMILIES
from paceline.decoder.steps import prefill
from paceline.draft import mtp
from paceline.draft.mtp import MIMO, MtpConfig, MtpDrafter, load
from tests.decoder.test_coded import eight_bits
from tests.decoder.tiny import Workshop, fresh
from tests.draft.random_heads import random_weights, rounds, save_mtp, save_narrowed, simulated_rounds

PROMPTS = [[5, 17, 17, 90], [4], [33, 2, 9, *range(20, 45)]]
_NAMES = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "post_norm",
}


def mimo(workshop: Workshop, folder: Path) -> dict[str, Tensor]:
    """Make a Qwen2 checkpoint a MiMo with a random MTP layer; return the layer's tensors without their prefix."""
    source = workshop.checkpoint(kind="qwen2")
    named = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "attention_bias": True}
    sizes = ModelConfig.from_pretrained(source)
    weights = random_weights(MtpConfig(MIMO, replace(sizes, model_type="mimo")).shapes())
    tensors = {MIMO.prefix + name: x for name, x in weights.items()}
    save_narrowed(source, folder, tensors, **named, num_nextn_predict_layers=1)
    return weights


NEXTN = ("glm4 moe", "deepseek v3")


def nextn(workshop: Workshop, folder: Path, kind: str) -> Path:
    """Add a random MTP layer to a checkpoint as its authors do: after the last layer, with tables that are not used."""
    source = workshop.checkpoint(kind=kind)
    config = MtpConfig.read(source, ModelConfig.from_pretrained(source))
    tables = {f"{table}.weight": torch.zeros(96, 32) for table in ("embed_tokens", "shared_head.head")}
    tensors = {config.prefix + name: x for name, x in {**random_weights(config.shapes()), **tables}.items()}
    assert config.prefix == "model.layers.3."
    return save_narrowed(source, folder, tensors)


class Oracle:
    """transformers' own layer over whole sequences, without a cache."""

    def __init__(self, model: PreTrainedModel, mtp: MtpModel, *, of_mimo: bool = False) -> None:
        self.model, self.of_mimo, self.mtp = model, of_mimo, mtp

    @classmethod
    def with_weights(cls, model: PreTrainedModel, weights: dict[str, Tensor], *, of_mimo: bool) -> Oracle:
        model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
        model.config.mtp_hidden_states_first = of_mimo
        mtp, named = MtpModel(model, 1).eval(), {}
        for name, x in weights.items():
            module, _, kind = name.rpartition(".")
            named[f"layers.0.{_NAMES.get(module, f'mtp_block.{module}')}.{kind}"] = x
        missing, surplus = mtp.load_state_dict(named, strict=False)
        assert not surplus and all(not name.startswith("layers") for name in missing)
        return cls(model, mtp, of_mimo=of_mimo)

    @classmethod
    def from_pretrained(cls, folder: Path) -> Oracle:
        """Tensors that transformers reads in a target's folder, with the number that its layer has in the head."""
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\..*"]
        return cls(model, MtpModel.from_pretrained(model).eval())

    @torch.inference_mode()
    def states(self, text: list[int]) -> Tensor:
        """The target's last hidden states, [n, H]."""
        return self.model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def pairs(self, tokens: list[int], states: Tensor) -> Tensor:
        """tokens [n], states [n, H] -> the layer's output [n, H]."""
        embeds = self.mtp.embed_tokens(torch.tensor([tokens])).clone()
        if self.of_mimo:
            embeds[:, 0] = 0
        at, cache = torch.arange(len(tokens)).unsqueeze(0), MtpCache(config=self.model.config.get_mtp_config())
        return self.mtp.forward_layer(0, states.unsqueeze(0), at, cache, inputs_embeds=embeds)[0]

    @torch.inference_mode()
    def drafted(self, text: list[int], k: int) -> tuple[list[int], list[Tensor]]:
        """Drafts that follow a text, and their logits; the target has not read its last token."""
        tokens, states = text[1:], self.states(text[:-1])
        drafts: list[int] = []
        logits: list[Tensor] = []
        for _ in range(k):
            last = self.pairs(tokens, states)[-1:]
            logits.append(self.model.lm_head(last)[0])
            drafts.append(int(logits[-1].argmax()))
            tokens, states = [*tokens, drafts[-1]], torch.cat([states, last])
        return drafts, logits


Made = tuple[SamplingDecoder, Callable[..., MtpDrafter], Oracle]


@pytest.fixture(params=["qwen3", "mimo", *NEXTN])
def made(request: pytest.FixtureRequest, workshop: Workshop, tmp_path: Path) -> Made:
    """A target, its drafter of a length through the disk, and what transformers computes."""
    if request.param in NEXTN:
        target = fresh(folder := nextn(workshop, tmp_path / "target", request.param), backend="native", batch_size=4)
        return target, lambda k=3: AutoDrafter.from_pretrained(folder, target, k=k), Oracle.from_pretrained(folder)  # type: ignore[return-value]
    source = workshop.checkpoint(kind="qwen2" if request.param == "mimo" else "qwen3")
    folder, model = tmp_path / "target", save_narrowed(source, tmp_path / "for transformers")
    if request.param == "mimo":
        weights = mimo(workshop, folder)
        target = fresh(folder, backend="native", batch_size=4)
    else:
        target = fresh(save_narrowed(source, folder), backend="native", batch_size=4)
        weights = save_mtp(folder := tmp_path / "head", target.config)
    network = (Qwen2ForCausalLM if request.param == "mimo" else Qwen3ForCausalLM).from_pretrained(model).eval()
    oracle = Oracle.with_weights(network, weights, of_mimo=request.param == "mimo")
    return target, lambda k=3: AutoDrafter.from_pretrained(folder, target, k=k), oracle  # type: ignore[return-value]


def test_the_target_of_mimo_is_a_qwen2(workshop: Workshop, tmp_path: Path) -> None:
    mimo(workshop, tmp_path / "mimo")
    model = Qwen2ForCausalLM.from_pretrained(
        save_narrowed(workshop.checkpoint(kind="qwen2"), tmp_path / "qwen2")
    ).eval()
    logits, _ = prefill(fresh(tmp_path / "mimo"), 0, PROMPTS[0])
    with torch.inference_mode():
        assert torch.allclose(logits[0, 0], model(torch.tensor(PROMPTS[:1])).logits[0, -1], atol=1e-4)


@pytest.mark.parametrize("kind", NEXTN)
def test_only_layers_beyond_the_network_are_ignored(workshop: Workshop, tmp_path: Path, kind: str) -> None:
    nextn(workshop, tmp_path / "one", kind)
    plain = fresh(save_narrowed(workshop.checkpoint(kind=kind), tmp_path / "none"))
    assert torch.equal(prefill(fresh(tmp_path / "one"), 0, PROMPTS[0])[0], prefill(plain, 0, PROMPTS[0])[0])
    with pytest.raises(CheckpointError, match=r"got also model\.layers\.2\.enorm\.weight"):
        fresh(save_narrowed(tmp_path / "one", tmp_path / "wrong", {"model.layers.2.enorm.weight": torch.ones(32)}))


@pytest.mark.parametrize("kind", NEXTN)
def test_the_router_s_correction_stays_exact(workshop: Workshop, tmp_path: Path, kind: str) -> None:
    target = fresh(folder := nextn(workshop, tmp_path / "target", kind), amp="bf16")
    config, weights = load(folder, target.config, torch.bfloat16)
    layer = MtpDrafter.from_pretrained(folder, target).head.layer
    assert torch.equal(layer.mlp.router_bias, weights["mlp.gate.e_score_correction_bias"])  # type: ignore[arg-type]
    assert not torch.equal(layer.mlp.router_bias, layer.mlp.router_bias.bfloat16().float())  # type: ignore[union-attr]
    assert config.layer.blueprint.experts is not None and not config.layer.blueprint.experts.dense


@pytest.mark.parametrize("kind", NEXTN)
def test_an_8_bit_mtp_layer_equals_its_dequantised_numbers(workshop: Workshop, tmp_path: Path, kind: str) -> None:
    source = nextn(workshop, tmp_path / "floats", kind)
    tensors, prefix, meant = load_file(source / "model.safetensors"), "model.layers.3.", {}
    for name in [name for name in tensors if name.startswith(prefix) and "_proj" in name and "eh_" not in name]:
        if name.endswith(".weight"):
            parts, meant[name.removeprefix(prefix)] = eight_bits(tensors.pop(name), (16, 24))
            tensors |= {name.removesuffix("weight") + part: x.contiguous() for part, x in parts.items()}
    (folder := tmp_path / "coded").mkdir()
    save_file(tensors, folder / "model.safetensors")
    coded = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 24]}
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": coded}
    (folder / "config.json").write_text(json.dumps(config))
    _, weights = load(folder, (target := fresh(folder)).config, torch.float32)
    assert len(meant) > 20 and all(torch.equal(weights[name], x) for name, x in meant.items())
    sampled = SpeculativeGenerator(str(folder), target, k=2).sample(PROMPTS[:1], max_new_tokens=8)
    assert torch.equal(sampled, target.sample(PROMPTS[:1], max_new_tokens=8))
    save_file(tensors | {prefix + "gate.weight": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"got also gate\.weight"):
        load(folder, target.config, torch.float32)


def test_mtp_logits_equal_transformers_step_by_step(made: Made) -> None:
    target, drafter, oracle = made
    text = PROMPTS[2]
    drafts, wanted = oracle.drafted(text, 4)
    head, states = drafter().head, oracle.states(text[:-1])
    numbers = [torch.tensor([n], dtype=torch.int32) for n in (0, len(text) - 2)]
    place = head.place(numbers[0], len(text) - 1, target.bucket_for(64))
    hidden = head.read(torch.tensor([text[1:]]).int(), states.unsqueeze(0), place, last=numbers[1])
    for index, (token, logits) in enumerate(zip(drafts, wanted, strict=True)):
        assert torch.allclose(head.logits(hidden)[0, 0], logits, atol=1e-4)
        place = head.place(numbers[1] + 1 + index, 1, target.bucket_for(64))
        hidden = head.next(torch.tensor([[token]]).int(), hidden, place)


def test_mtp_rounds_equal_a_simulation(made: Made) -> None:
    target, drafter, oracle = made
    text, accepted = rounds(SpeculativeGenerator(drafter(), target), PROMPTS[0], 40)
    expected = simulated_rounds(text, len(PROMPTS[0]) + 1, 3, lambda known: oracle.drafted(known, 3)[0])
    assert accepted[: len(expected)] == expected and 0 < sum(expected) < 3 * len(expected)
    assert text == target.sample(PROMPTS[:1], max_new_tokens=40)[0].tolist()


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"num_nextn_predict_layers": 2}, UnknownArchitectureError, "num_nextn_predict_layers: expected 1, got 2"),
        ({"hidden_layernorm_type": "x"}, UnknownArchitectureError, "'hidden_layernorm_type' is not a known setting"),
        ({"transformer_layer_config": None}, UnknownArchitectureError, "expected the key transformer_layer_config"),
        ({"model_type": "llama"}, UnknownArchitectureError, "model_type: expected one of qwen3 for MTP layers"),
        ({"model_type": "qwen3_next"}, UnknownArchitectureError, "got 'qwen3_next'"),
        ({"hidden_size": 64}, PairingError, "expected a target with hidden size 64 for this MTP layer, got 32"),
        ({"rope_interleaved": True}, UnknownArchitectureError, "rope_interleaved: expected False"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
            UnknownArchitectureError,
            "sliding",
        ),
        ({"intermediate_size": 44}, CheckpointError, "mlp.gate_proj.weight: expected shape"),
        ({"attention_bias": True}, MissingWeightsError, "self_attn.k_proj.bias"),
    ],
)
def test_mtp_keys_that_change_the_output_are_rejected_by_name(
    workshop: Workshop, tmp_path: Path, changes: dict[str, object], error: type[Exception], said: str
) -> None:
    target = workshop.decoder(kind="qwen3")
    save_mtp(tmp_path, target.config)
    config = json.loads((tmp_path / "config.json").read_text())
    layer = config["transformer_layer_config"]
    inside = layer if changes.keys() <= {*layer, "rope_interleaved"} else config
    inside.update(changes)
    if "use_sliding_window" in changes:
        del layer["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=said):
        AutoDrafter.from_pretrained(tmp_path, target, k=2)


@pytest.mark.parametrize("kind", ["mimo", *NEXTN])
def test_a_target_with_several_mtp_layers_is_rejected(workshop: Workshop, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "target"
    if kind == "mimo":
        mimo(workshop, folder)
    else:
        nextn(workshop, folder, kind)
    target = fresh(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 3}))
    with pytest.raises(UnknownArchitectureError, match="num_nextn_predict_layers: expected 1, got 3"):
        SpeculativeGenerator(str(folder), target, k=2)


def test_families_say_that_mtp_layers_draft_for_them() -> None:
    """The table of families is read without this module."""
    known = {name for layout in (MIMO, mtp.NEXTN, mtp.SPECULATORS) for name in layout.families}
    assert {name for name, row in MODEL_FAMILIES.items() if row.mtp} == known
