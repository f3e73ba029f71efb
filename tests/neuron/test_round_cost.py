"""Costs of a round on Neuron by its graphs at real size: budgets that fail if a change makes it dearer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.core.errors import ConfigurationError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.config import ModelConfig
from paceline.eagle import train
from paceline.eagle.config import EagleConfig
from paceline.eagle.formats import written
from paceline.neuron import chips, round_cost, round_graphs
from paceline.neuron.hardware_speed import HardwareQuestion, from_hardware
from paceline.neuron.round_graphs import EagleDraft, ModelDraft, RoundSetup, read_draft
from paceline.placement.planning.instances import instance
from tests.cli.calling import call
from tests.neuron.conftest import Widened

SHAPES = {
    "Llama-3-8B": (4096, 14336, 32, 32, 128, False),
    "Llama-3.2-1B": (2048, 8192, 16, 32, 64, True),
    "Llama-3-70B": (8192, 28672, 80, 64, 128, False),
    "Llama-3-405B": (16384, 53248, 126, 128, 128, False),
    "Llama-2-7B": (4096, 11008, 32, 32, 128, False),
    "Llama-2-13B": (5120, 13824, 40, 40, 128, False),
    "Llama-2-70B": (8192, 28672, 80, 64, 128, False),
}


def fields(name: str) -> dict[str, Any]:
    hidden, inner, layers, heads, width, tied = SHAPES[name]
    return {
        "model_type": "llama", "vocab_size": 32_000 if name.startswith("Llama-2") else 128_256, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads if name in ("Llama-2-7B", "Llama-2-13B") else 8, "head_dim": width,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied, "hidden_act": "silu",
    }  # fmt: skip


def setup(target: str, draft: str, **more: Any) -> RoundSetup:
    configs = [ModelConfig.from_fields(Fields(fields(name), name)) for name in (target, draft)]
    return RoundSetup(configs[0], ModelDraft(configs[1]), **{"degree": 8, "k": 4, **more})


def qwen3(**more: Any) -> RoundSetup:
    """Qwen3-8B with an EAGLE-3 head of separate sizes that drafts 32,000 ids."""
    sizes = fields("Llama-3-8B") | {"model_type": "qwen3", "vocab_size": 151_936, "intermediate_size": 12_288}
    sizes |= {"num_hidden_layers": 36, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    target = ModelConfig.from_fields(Fields(sizes, "Qwen3-8B"))
    return RoundSetup(target, EagleDraft(eagle3(target)), **{"degree": 8, "k": 3, **more})


def eagle3(target: ModelConfig) -> EagleConfig:
    return train.default_config(target, version=3, layers=(2, 18, 33), draft_vocab_size=32_000)


def test_a_round_of_llama_8b_and_1b_stays_within_its_budget() -> None:
    found: Any = round_cost.round_cost(setup("Llama-3-8B", "Llama-3.2-1B"), instance("inf2.48xlarge"))
    whole, parts = found["round"], found["parts_ms"]
    assert found["over_limits"] == []
    # What a core's eighth of the 8.03 and four times 1.24 billion weights is, without embeddings, and the caches.
    assert 3.10e9 < whole["bytes_read"] < 3.25e9 and whole["bytes_widened"] == 0
    assert set(whole["products"]) <= {"bfloat16", "float32"} and whole["products"].get("float32", 0) < 1e4
    assert sum(one["count"] for one in whole["collectives"]) == 65 + 4 * 33 + 5
    assert max(one["bytes"] for one in whole["collectives"]) == 5 * 4096 * 4, "no row of logits is gathered"
    assert whole["largest_gather"] == whole["top_k_over_vocabulary"] == 0 and whole["passes_over_vocabulary"] <= 80
    assert whole["instructions"] < 150_000 and whole["operations"] < 14_000
    assert whole["sampler_share"] <= 0.05
    assert whole["ideal_ms"] < 8 and whole["expected_ms"] < 26
    assert next(iter(parts)) == "target layers", "the dearest first"


def test_a_graph_of_one_of_16_slots_costs_as_much_as_one_slot() -> None:
    """Costs do not depend on other entries of the cache."""
    lone, first, every = (
        round_cost.round_cost(setup("Llama-3-8B", "Llama-3.2-1B", **more), instance("inf2.48xlarge"))
        for more in ({}, {"slots": 16, "batch": 1}, {"slots": 16})
    )
    figures: list[Any] = [found["round"] for found in (lone, first, every)]
    for name in ("expected_ms", "bytes_read", "instructions"):
        assert figures[0][name] == figures[1][name] < figures[2][name]
    assert figures[0]["memory_per_core"] < figures[1]["memory_per_core"] == figures[2]["memory_per_core"]


def test_a_round_of_qwen3_8b_and_an_eagle_3_head_stays_within_its_budget() -> None:
    found: Any = round_cost.round_cost(qwen3(), instance("inf2.48xlarge"))
    whole, parts = found["round"], found["parts_ms"]
    assert found["over_limits"] == [] and next(iter(parts)) == "target layers", "the dearest first"
    # An eighth of 7.57 billion weights without the embedding, and of three times 0.39 of the head.
    assert 2.15e9 < whole["bytes_read"] < 2.30e9 and whole["bytes_widened"] == 0
    assert parts["draft head"]["memory"] < 1.3 and whole["instructions"] < 105_000
    # Two all-reduces a layer and one for the embedding; three and a gather for each drafted token, whose embedding is
    # one of them; a gather of what `fc` gives, and one for the verified tokens.
    assert sum(one["count"] for one in whole["collectives"]) <= 73 + 3 * 4 + 2
    assert max(one["bytes"] for one in whole["collectives"]) == 4 * 4096 * 4, "no row of logits is gathered"
    assert whole["sampler_share"] <= 0.05 and whole["largest_gather"] <= 4
    assert whole["ideal_ms"] < 5.3 and whole["expected_ms"] < 15


def test_a_head_can_be_replicated_on_every_core() -> None:
    """Small heads are: what a core is spared must be worth three collectives a token."""
    target = qwen3().target
    small = replace(eagle3(target), hidden_size=512, intermediate_size=1536, num_heads=8, num_kv_heads=8, head_dim=64)
    tiny, large = EagleDraft(replace(small, draft_vocab_size=8192)), EagleDraft(eagle3(target))
    asked = RoundSetup(target, tiny, 8, 3)
    assert tiny.memory(asked) == replace(tiny, divided=False).memory(asked)
    assert replace(tiny, divided=True).memory(asked) < tiny.memory(asked) / 2
    assert large.memory(asked) < replace(large, divided=False).memory(asked) / 6
    assert large.padding(24)["attention heads"] == (32, 48) and tiny.padding(24) == {}


def test_a_round_of_llama_70b_and_8b_on_24_cores_stays_within_its_budget() -> None:
    found: Any = round_cost.round_cost(setup("Llama-3-70B", "Llama-3-8B", degree=24, k=1), instance("inf2.48xlarge"))
    whole = found["round"]
    assert found["over_limits"] == [] and whole["bytes_widened"] == 0
    assert sum(one["count"] for one in whole["collectives"]) <= 161 + 65 + 2
    assert whole["sampler_share"] <= 0.05 and whole["instructions"] < 300_000
    assert whole["ideal_ms"] < 17 and whole["expected_ms"] < 42


def test_a_head_is_recognised_by_its_configuration(tmp_path: Path) -> None:
    setup = qwen3()
    (tmp_path / "config.json").write_text(json.dumps(written(eagle3(setup.target), "paceline")))
    assert read_draft(tmp_path, setup.target) == setup.draft
    published = fields("Llama-3-8B") | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    published |= {"draft_vocab_size": 32_000, "vocab_size": 151_936, "intermediate_size": 12_288}
    (tmp_path / "config.json").write_text(json.dumps(published))
    found = read_draft(tmp_path, setup.target)
    assert isinstance(found, EagleDraft) and (found.config.version, found.config.layers) == (3, (2, 18, 33))
    for more in ({"pard_token": 7}, {"dflash_config": {}}):
        (tmp_path / "config.json").write_text(json.dumps(published | more))
        with pytest.raises(UnknownArchitectureError, match="or model that drafts in one pass; plan with another draft"):
            read_draft(tmp_path, setup.target)


def test_padded_heads_on_24_cores_are_counted() -> None:
    found: Any = round_cost.round_cost(setup("Llama-3-8B", "Llama-3.2-1B", degree=24), instance("inf2.48xlarge"))
    padded = {"attention heads": [32, 48], "columns of the MLP": [14336, 14352]}
    assert found["padding"] == {"target": padded, "draft": {**padded, "columns of the MLP": [8192, 8208]}}
    whole = found["round"]
    # A third of what 8 cores read and some more: zeros of 16 heads, and each core still has one K/V head of the caches.
    assert 1.17e9 < whole["bytes_read"] < 1.27e9 and whole["memory_per_core"] < 2**30
    assert found["over_limits"] == [] and whole["ideal_ms"] < 3 and whole["expected_ms"] < 17


def test_a_widened_weight_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_graphs, "TraceableKernels", Widened)
    found: Any = round_cost.round_cost(setup("Llama-3.2-1B", "Llama-3.2-1B", k=1), instance("inf2.48xlarge"))
    assert found["round"]["bytes_widened"] > 0.3e9
    assert [one.split(":")[0] for one in found["over_limits"]] == ["widened weights"]


def test_the_command_reports_exceeded_limits(tmp_path: Path) -> None:
    for name in ("Llama-3-70B", "Llama-3.2-1B"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(fields(name)))
    asked = ["cost", "--target", str(tmp_path / "Llama-3-70B"), "--draft", str(tmp_path / "Llama-3.2-1B"), "--k", "1"]
    done = CliRunner().invoke(app, [*asked, "--instance", "inf2.48xlarge", "--batch-size", "256", "--json"])
    assert done.exit_code == 0, done.output
    nowhere = CliRunner().invoke(app, asked)
    assert nowhere.exit_code == 2 and "--instance: expected a type such as inf2.48xlarge" in nowhere.stderr
    found = json.loads(done.stdout)
    assert found["over_limits"][1].startswith("instructions: about ") and found["round"]["instructions"] > 5e6
    assert found["over_limits"][0].startswith("memory: ") and found["round"]["memory_per_core"] > 16 * 2**30
    assert {"ideal_ms", "expected_ms", "sampler_share", "largest_gather"} <= set(found["round"])


@pytest.mark.parametrize("one", [*chips.PUBLISHED, *chips.MISSED], ids=lambda one: f"{one.model} on {one.instance}")
def test_published_decoding_is_within_a_quarter(one: chips.Published) -> None:
    load = {"degree": one.degree, "rows": one.context, "slots": one.slots, "quantization": one.quantization}
    plain = setup(one.model, one.model, k=0, **load)
    found: Any = round_cost.round_cost(plain, instance(one.instance))
    expected = found["round"]["expected_ms"] / 1e3
    print(f"{one.model}, {one.instance}, tp {one.degree}: {expected * 1e3:.2f} of {one.seconds * 1e3:.2f} ms")
    if one in chips.MISSED:
        assert 0.6 < expected / one.seconds < 0.75
    else:
        assert expected == pytest.approx(one.seconds, rel=0.05 if one.use == "fitted" else 0.25)


def test_a_head_gains_more_than_a_draft_model_on_24_cores() -> None:
    """Collectives make up the cost of a drafted token: a model of 16 layers has 33, a head 4."""
    machine = instance("inf2.48xlarge")
    pair: Any = round_cost.round_cost(setup("Llama-3-8B", "Llama-3.2-1B", degree=24, k=3), machine)
    head: Any = round_cost.round_cost(qwen3(degree=24), machine)
    plain: Any = round_cost.round_cost(qwen3(degree=24, k=0), machine)
    assert head["round"]["expected_ms"] < 1.6 * plain["round"]["expected_ms"] < pair["round"]["expected_ms"]


def test_instances_without_figures_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match=r"instance: expected one of .*, got cpu"):
        round_cost.round_cost(setup("Llama-3-8B", "Llama-3.2-1B"), instance("cpu"))
    with pytest.raises(ConfigurationError, match="got 16"):
        round_cost.round_cost(setup("Llama-3-8B", "Llama-3.2-1B", degree=16), instance("inf2.48xlarge"))
    with pytest.raises(ConfigurationError, match="quantization: expected int8, got 'foo'"):
        round_cost.round_cost(setup("Llama-3-8B", "Llama-3.2-1B", quantization="foo"), instance("inf2.48xlarge"))


def test_the_parts_of_a_round_add_up_to_the_round() -> None:
    """Between the corners too: depth and slots are linear."""
    pair, chip = setup("Llama-3.2-1B", "Llama-3.2-1B", k=3), instance("inf2.48xlarge")
    verify = round_cost.PartTimes(pair, chip, drafts=False, depths=(0, 3), slots=1)
    drafts = round_cost.PartTimes(pair, chip, drafts=True, depths=(1, 3), slots=1)
    whole: Any = round_cost.round_cost(setup("Llama-3.2-1B", "Llama-3.2-1B", k=2), chip)
    for name in ("expected", "worst"):
        time = getattr(verify.at(2, 1).plus(drafts.at(2, 1)), name) + chips.LAUNCH.value
        assert time * 1e3 == pytest.approx(whole["round"][f"{name}_ms"], rel=0.02)


def test_a_verified_token_costs_what_is_published_for_trainium2() -> None:
    pair = setup("Llama-3-8B", "Llama-3-8B", degree=4)
    verify = round_cost.PartTimes(pair, instance("trn2.48xlarge"), drafts=False, depths=(0, 15), slots=1)
    token = (verify.at(15, 1).expected - verify.at(0, 1).expected) / 15
    assert token == pytest.approx(0.2e-3, rel=0.05), "fitted"


def test_speculation_published_for_trainium2_is_missed() -> None:
    """By a factor of 2 and more, as the page says: both figures are of vLLM's plug-in."""
    trn2, sizes = instance("trn2.48xlarge"), {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    small = fields("Llama-3-8B") | sizes | {"model_type": "qwen3", "vocab_size": 151_936, "tie_word_embeddings": True}
    qwen = ModelConfig.from_fields(Fields(small, "Qwen3-4B"))
    verify = round_cost.PartTimes(RoundSetup(qwen, ModelDraft(qwen), 4, 4), trn2, drafts=False, depths=(0, 15), slots=1)
    token = (verify.at(15, 1).expected - verify.at(0, 1).expected) / 15
    assert 0.18e-3 < token < 0.7e-3 / 2, "published: 0.7 ms"
    target = ModelConfig.from_fields(Fields(fields("Llama-3-8B"), "Llama-3.1-8B"))
    head = EagleDraft(train.default_config(target, version=3, layers=(2, 16, 29), draft_vocab_size=32_000))
    found: Any = round_cost.round_cost(RoundSetup(target, head, 8, 3, slots=2, rows=640), trn2)
    published = 6.41 * 3.22  # ms per token, and tokens a round
    assert 0.45 < found["round"]["expected_ms"] / published < 0.6


def test_a_prompt_has_a_time() -> None:
    found: Any = round_cost.round_cost(setup("Llama-3.2-1B", "Llama-3.2-1B", k=0), instance("trn3.gen1"))
    assert found["prefill"]["chunk"] == 128 and found["prefill"]["expected_ms"] > found["round"]["expected_ms"]


@pytest.mark.full
def test_the_planner_takes_the_design_that_gains_most() -> None:
    """With int8 weights, as AWS's row has, 8B + 1B are 1.49 and 1.65 times as fast as its 6.42 ms, by the model."""
    pair, inf2 = setup("Llama-3-8B", "Llama-3.2-1B"), instance("inf2.48xlarge")
    for rate, times in ((0.7, 1.48), (0.8, 1.6)):
        asked = HardwareQuestion(pair.target, pair.draft, inf2, [rate], max_depth=2, degrees=(24,), quantization="int8")
        best = from_hardware(asked, [1])[0].best
        print(best.label, 1e3 / best.tokens_per_second, "ms per token")
        assert (best.mode, best.cores) == ("shared cores", (24, 0)) and best.tokens_per_second > times / 6.42e-3
    head = qwen3()
    asked = HardwareQuestion(head.target, head.draft, inf2, [0.73], max_depth=3, degrees=(24,))
    best, *others = from_hardware(asked, [1])[0].candidates
    assert best.mode == "shared cores, head sharded" and best.speedup > 1.8
    assert {one.mode for one in others} >= {"plain", "shared cores, head replicated"}


def test_a_speed_plan_uses_computed_times(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields("Llama-3.2-1B")))
    asked = ["plan-speed", "--target", tmp_path, "--draft", tmp_path, "--instance", "inf2.48xlarge", "--tp-degree", "8"]
    asked += ["--max-depth", "1"]
    said = call(*asked, "--acceptance", "0.9", "--json")
    assert said.exit_code == 0, said.stderr
    values = json.loads(said.stdout)
    (load,) = values["loads"]
    modes = {(one["mode"], *one["cores"]) for one in load["candidates"]}
    apart = {(mode, 8, own) for mode in ("separate cores", "separate cores, drafting ahead") for own in (1, 2, 4, 8)}
    assert modes == {("plain", 8, 0), ("shared cores", 8, 0), *apart}
    assert all(one["low"] <= one["speedup"] <= one["high"] for one in load["candidates"])
    assert values["times"] == "arithmetic, not measured"
    # The draft is as large as its target: what it drafts while the target verifies is what a round saves.
    assert "separate cores, drafting ahead: draft model, k 1, 8 cores and 8 for the draft" in load["verdict"]
    unread = call(*asked, "--acceptance", "0.9", "--batch-sizes", "many")
    assert unread.exit_code == 2
    assert "--batch-sizes: expected numbers from 1 on, got 'many'" in " ".join(unread.stderr.split())
    refused = call(*asked, "--acceptance", "0.9", "--verify")
    assert refused.exit_code == 2 and "--verify: expected --experiment and" in " ".join(refused.stderr.split())
    assert "--acceptance: expected --target, --draft and --acceptance" in " ".join(call(*asked).stderr.split())
