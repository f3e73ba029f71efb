"""Files of Medusa heads: every layout reads back as the same heads, and what is missing or strange is named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.core.errors import (
    CheckpointError,
    ConfigurationError,
    MissingWeightsError,
    UnknownArchitectureError,
    WeightShapeError,
    WeightValueError,
)
from paceline.medusa import checkpoint
from paceline.medusa.config import MedusaConfig, is_medusa_config
from paceline.medusa.network import Heads

OWN = MedusaConfig(heads=3, layers=1, hidden_size=6, vocab_size=9, tied=False, base="someone/target")
TIED = replace(OWN, layers=2, tied=True)


def published(name: str) -> dict[str, object]:
    """A config.json as it was found; where is in the file."""
    found = json.loads((Path(__file__).parent / "published" / f"{name}.json").read_text())
    assert found["source"] and found["looked_up"] and is_medusa_config(found["config"])
    return dict(found["config"])


def weights(config: MedusaConfig, *, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in config.shapes().items()}


def output(config: MedusaConfig = OWN) -> nn.Parameter:
    torch.manual_seed(7)
    return nn.Parameter(torch.randn(config.vocab_size, config.hidden_size), requires_grad=False)


def reference(config: MedusaConfig, named: dict[str, Tensor], states: Tensor, head: int) -> Tensor:
    """Medusa's own module, written out: Sequential of residual blocks and a linear layer."""
    x = states
    for layer in range(config.layers):
        name = f"heads.{head}.blocks.{layer}"
        x = x + nn.functional.silu(x @ named[f"{name}.weight"].T + named[f"{name}.bias"])
    return x @ (output() if config.tied else named[f"heads.{head}.projection.weight"]).T


def filled(config: MedusaConfig, named: dict[str, Tensor]) -> Heads:
    made = Heads(config, output(), torch.float32)
    assert all(bool(x.isnan().all()) for x in made.own().values()), "until they are filled"
    made.fill(named)
    return made


def check(folder: Path, named: dict[str, Tensor]) -> None:
    """Compare the heads that a folder is read as."""
    found = checkpoint.load(folder, vocab_size=9).weights
    assert found.keys() == named.keys() and all(torch.equal(found[name], x) for name, x in named.items())


@pytest.mark.parametrize("config", [OWN, TIED, replace(OWN, layers=0), replace(TIED, layers=1)])
def test_the_heads_are_residual_blocks_and_a_projection(config: MedusaConfig) -> None:
    named, states = weights(config), torch.randn(4, config.hidden_size)
    made = filled(config, named)(states, nn.functional.linear)
    assert made.shape == (4, config.heads, config.vocab_size)
    for head in range(config.heads):
        torch.testing.assert_close(made[:, head], reference(config, named, states, head))


@pytest.mark.parametrize("source", checkpoint.LAYOUTS)
@pytest.mark.parametrize("layout", checkpoint.LAYOUTS)
def test_every_layout_is_converted_to_every_other(tmp_path: Path, source: str, layout: str) -> None:
    named = weights(OWN)
    checkpoint.save(tmp_path / "a", OWN, named, layout=source)
    checkpoint.convert(tmp_path / "a", tmp_path / "b", layout=layout, output=output())
    assert checkpoint.load(tmp_path / "b", vocab_size=9).config == OWN
    check(tmp_path / "b", named)


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads.", "model.medusa_head.", "model.medusa_head_"])
def test_heads_are_found_alone_in_a_whole_model_and_in_shards(tmp_path: Path, prefix: str) -> None:
    named, norm = weights(OWN), {"model.norm.weight": torch.ones(6)}
    bare = checkpoint.renamed(OWN, named, "medusa")
    alone, whole, many = (tmp_path / name for name in ("alone", "whole", "many"))
    for folder in (alone, whole, many):
        folder.mkdir()
    save_file(bare, alone / "medusa_lm_head.safetensors")
    save_file({**{prefix + name: x for name, x in bare.items()}, **norm}, whole / "model.safetensors")
    places = {}
    for part in range(3):
        shard, file = (
            {prefix + name: x for name, x in bare.items() if name[0] == str(part)},
            f"model-{part}.safetensors",
        )
        save_file({**shard, **norm}, many / file)
        places |= dict.fromkeys(shard, file)
    (many / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for folder in (alone, whole, many):
        check(folder, named)


@pytest.mark.parametrize(("layout", "prefix"), [("medusa", ""), ("nxd", "medusa_head_")])
def test_tensor_names_of_other_projects_are_written(tmp_path: Path, layout: str, prefix: str) -> None:
    file = checkpoint.save(tmp_path, OWN, weights(OWN), layout=layout)
    parts = ("0.linear.weight", "0.linear.bias", "1.weight")
    assert set(torch.load(file, weights_only=True)) == {f"{prefix}{i}.{part}" for i in range(3) for part in parts}


def test_medusas_module_reads_the_saved_files() -> None:
    """The module of Medusa's own code, rebuilt: `[block] * n` and a linear layer, in a list."""

    class Res(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return x + nn.functional.silu(self.linear(x))

    def head(layers: int) -> nn.Module:
        return nn.Sequential(*([Res(6)] * layers), nn.Linear(6, 9, bias=False))

    theirs = nn.ModuleList(head(2) for _ in range(3))
    config = replace(OWN, layers=2)
    names = checkpoint.canonical(theirs.state_dict())
    named = {ours: theirs.state_dict()[name] for ours, name in names.items()}
    assert checkpoint.survey({name: tuple(x.shape) for name, x in named.items()}, vocab_size=9) == replace(
        config, base=""
    )
    assert checkpoint.shared(config, named)
    states = torch.randn(5, 6)
    ours = filled(config, named)(states, nn.functional.linear)
    torch.testing.assert_close(ours, torch.stack([one(states) for one in theirs], 1).detach())
    theirs.load_state_dict(checkpoint.renamed(config, named, "medusa"))


def test_different_blocks_are_rejected_for_layouts_with_one_block() -> None:
    config = replace(OWN, layers=2)
    assert not checkpoint.shared(config, weights(config))
    with pytest.raises(ConfigurationError, match="repeats one block 2 times"):
        checkpoint.renamed(config, weights(config), "medusa")
    for wrong in (config, TIED):
        with pytest.raises(ConfigurationError, match="layout: NxD Inference expects heads with one block and"):
            checkpoint.renamed(wrong, weights(wrong), "nxd")
    with pytest.raises(ConfigurationError, match="layout: expected one of"):
        checkpoint.renamed(OWN, weights(OWN), "eagle")


def test_tied_heads_are_saved_with_copies_of_the_output_layer(tmp_path: Path) -> None:
    config = replace(TIED, layers=1)
    checkpoint.save(tmp_path / "ours", config, weights(config))
    assert not any("projection" in name for name in load_file(tmp_path / "ours" / "model.safetensors"))
    checkpoint.convert(tmp_path / "ours", tmp_path / "theirs", layout="medusa", output=output())
    states = torch.randn(2, 6)
    before = checkpoint.heads(tmp_path / "ours", output(), torch.float32)(states, nn.functional.linear)
    there = checkpoint.heads(tmp_path / "theirs", output(), torch.float32)
    assert not there.config.tied
    torch.testing.assert_close(there(states, nn.functional.linear), before)


def test_the_number_of_heads_comes_from_the_tensors(tmp_path: Path) -> None:
    """Published files say 2 and hold 5."""
    path, five = tmp_path / "config.json", replace(OWN, heads=5)
    checkpoint.save(tmp_path, five, weights(five), layout="medusa")
    for told, base in ((published("medusa-vicuna-7b"), "lmsys/vicuna-7b-v1.3"), ({"medusa_num_heads": None}, "")):
        path.write_text(json.dumps(told))
        assert checkpoint.load(tmp_path, vocab_size=9).config == replace(five, base=base)
    path.unlink()
    assert checkpoint.load(tmp_path, vocab_size=9).config == replace(five, base="")
    for key, value, said in (
        ("medusa_num_heads", 6, "medusa_num_heads: expected 5"),
        ("medusa_num_layers", 2, "medusa_num_layers: expected 1"),
    ):
        path.write_text(json.dumps({key: value}))
        with pytest.raises(MissingWeightsError, match=said):
            checkpoint.load(tmp_path, vocab_size=9)


@pytest.mark.parametrize("name", sorted(OWN.shapes()))
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    named = weights(OWN)
    del named[name]
    save_file(named, tmp_path / "model.safetensors")
    with pytest.raises(MissingWeightsError):
        checkpoint.heads(tmp_path, output(), torch.float32)


def test_a_missing_head_is_named() -> None:
    shapes = {name: shape for name, shape in OWN.shapes().items() if not name.startswith("heads.1.")}
    with pytest.raises(MissingWeightsError, match="expected 3 Medusa heads, got none with number 1"):
        checkpoint.survey(shapes, vocab_size=9)


def test_damaged_head_files_are_rejected(tmp_path: Path) -> None:
    named = weights(OWN)
    for change, error, said in (
        ({"heads.0.blocks.0.bias": torch.full((6,), float("nan"))}, WeightValueError, "contains NaN"),
        ({"heads.0.blocks.0.bias": torch.ones(5)}, WeightShapeError, "expected shape"),
        ({"heads.0.blocks.0.bias": torch.ones(6, dtype=torch.int8)}, CheckpointError, "bias: the data type I8 is not"),
        ({"0.1.weight": torch.ones(9, 6)}, CheckpointError, "keep one layout"),
        ({"heads.0.blocks.0.bias": torch.tensor(1.0)}, WeightShapeError, "single number"),
        ({"heads.1.projection.weight": torch.tensor(1.0)}, WeightShapeError, "single number"),
        ({"heads.1.projection.bias": torch.ones(9)}, CheckpointError, "expected residual blocks and a projection"),
        ({"medusa_head_0.norm.weight": torch.ones(6)}, CheckpointError, "expected residual blocks and a projection"),
    ):
        save_file({**named, **change}, tmp_path / "model.safetensors")
        with pytest.raises(error, match=said):
            checkpoint.heads(tmp_path, output(), torch.float32)
        with pytest.raises(error, match=said):
            checkpoint.convert(tmp_path, tmp_path / "out", layout="paceline", output=output())
    save_file({"model.norm.weight": torch.ones(6)}, tmp_path / "model.safetensors")
    with pytest.raises(MissingWeightsError, match="got none; give the file that contains the heads"):
        checkpoint.load(tmp_path, vocab_size=9)
    with pytest.raises(CheckpointError, match="expected a folder"):
        checkpoint.load(tmp_path / "absent", vocab_size=9)


@pytest.mark.parametrize(
    ("layout", "stale"),
    [("paceline", "medusa_lm_head.pt"), *((name, "medusa_lm_head.safetensors") for name in ("nxd", "medusa"))],
)
def test_heads_are_not_written_next_to_a_file_that_is_read_first(tmp_path: Path, layout: str, stale: str) -> None:
    (tmp_path / stale).touch()
    with pytest.raises(ConfigurationError, match=f"expected a folder without other heads, got {stale}"):
        checkpoint.save(tmp_path, OWN, weights(OWN), layout=layout)
    (tmp_path / stale).unlink()
    for seed in (1, 2):  # over heads of the same name
        assert checkpoint.save(tmp_path, OWN, weights(OWN, seed=seed), layout=layout).stat().st_mode & 0o777 == 0o644
        check(tmp_path, weights(OWN, seed=seed))


def test_unknown_head_settings_are_rejected(tmp_path: Path) -> None:
    """The rest of the file may be the target's own, whose keys are not the heads'."""
    checkpoint.save(tmp_path, OWN, weights(OWN), layout="medusa")
    path = tmp_path / "config.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "num_attention_heads": 4, "medusa_choices": None}))
    checkpoint.load(tmp_path, vocab_size=9)
    for more, said in (
        ({"medusa_num_decoders": 2}, "'medusa_num_decoders' is not a known setting"),
        (published("vllm-medusa"), "which is not supported; use the checkpoint that it was"),
    ):
        path.write_text(json.dumps({**told, **more}))
        with pytest.raises(UnknownArchitectureError, match=said):
            checkpoint.load(tmp_path, vocab_size=9)
    path.unlink()
    (tmp_path / "medusa_lm_head.pt").unlink()
    save_file({"blocks.0.layers.0.weight": torch.ones(6, 6)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"blocks.0.layers.0.weight belongs to vLLM's layout"):
        checkpoint.load(tmp_path, vocab_size=9)


def test_a_pickle_with_code_in_it_is_not_run(tmp_path: Path) -> None:
    torch.save({"0.0.linear.weight": Path("x")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="none of which was executed; use a safetensors checkpoint"):
        checkpoint.load(tmp_path, vocab_size=9)


def test_heads_of_another_target_are_rejected() -> None:
    with pytest.raises(WeightShapeError, match="trained for it"):
        Heads(replace(OWN, vocab_size=10), output(), torch.float32)
    for wrong in ({"heads": 0}, {"layers": -1}, {"hidden_size": 0}):
        with pytest.raises(ConfigurationError):
            replace(OWN, **wrong)
    with pytest.raises(ConfigurationError, match="layers: expected at least 1 for Medusa heads without their"):
        replace(TIED, layers=0)
