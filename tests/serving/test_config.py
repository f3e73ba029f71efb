"""The file for `serve deploy`: Serve's own schema accepts it, and the builder understands it. Nothing is started."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import gguf
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.core.errors import ConfigurationError, PlanError
from paceline.decoder.weights import hub
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import PackedMatrix
from paceline.placement import ModelSpec
from paceline.placement.host import environment
from paceline.serving.ray_app import build
from paceline.serving.replica import model_deployment
from paceline.workers.config import WorkerConfig
from tests.cli.calling import refused
from tests.decoder import gguf_files
from tests.decoder.tiny import Workshop


@pytest.fixture
def models(workshop: Workshop, tmp_path: Path) -> Path:
    shape = "n_positions: 64, amp: f32, backend: eager, tp_degree: 2"
    (tmp_path / "models.yaml").write_text(
        f"models:\n  - {{name: chat, path: {workshop.checkpoint()}, {shape}}}\n"
        f"  - {{name: small, path: {workshop.checkpoint('draft')}, draft_of: chat, {shape}}}\n"
        "fault_policy: {draft_ahead: true, stall_timeout_s: 5}\n"
    )
    return tmp_path / "models.yaml"


def test_ray_serve_deploys_the_config(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models.parent)
    done = CliRunner().invoke(
        app, ["serve", "models.yaml", "--instance", "inf2.48xlarge", "--port", "81", "--print-serve-config"]
    )
    assert done.exit_code == 0, done.output
    config = ServeDeploySchema(**yaml.safe_load(done.stdout))
    assert (config.http_options.host, config.http_options.port) == ("127.0.0.1", 81)
    (application,) = config.applications
    assert application.args == {"models": str(models), "instance": "inf2.48xlarge"}  # found from any folder
    module, _, name = str(application.import_path).partition(":")
    ingress = getattr(import_module(module), name)(application.args)._bound_deployment
    assert ingress.name == "openai"
    model = ingress.init_args[0]["chat"]._bound_deployment
    for one in (ingress, model):  # until it takes its own, no process sees a core
        variables = one._replica_config.ray_actor_options["runtime_env"]["env_vars"]
        assert variables.items() >= environment.without_cores().items()
    group, fault_policy, _ = model.init_args
    assert model._replica_config.placement_group_bundles == [{"CPU": 0.01, "neuron_cores": 2.0}, {"neuron_cores": 2.0}]
    target, draft = group.plan.placements
    assert (target.label, draft.label) == ("chat", "small")
    strategies = [
        model_deployment(group, replace(fault_policy, colocate=near))._bound_deployment._replica_config
        for near in (True, False)
    ]
    assert [one.placement_group_strategy for one in strategies] == ["STRICT_PACK", "PACK"]
    assert fault_policy.draft_ahead and fault_policy.stall_timeout_s == 5


def test_ray_serve_scales_a_model_as_configured(workshop: Workshop) -> None:
    shape = {"path": str(workshop.checkpoint()), "n_positions": 64, "amp": "f32", "backend": "eager", "batch_size": 4}
    scaling = {"min_replicas": 0, "max_replicas": 3, "upscale_delay_s": 2}
    scaled = {"name": "a", "autoscaling": scaling, "idle_ttl_s": 60, **shape}
    entries = [scaled, {"name": "b", "load": "on_demand", "replicas": 2, **shape}, {"name": "c", **shape}]
    ingress = build({"models": entries, "instance": "inf2.48xlarge"})._bound_deployment
    a, c = (app._bound_deployment._deployment_config for app in ingress.init_args[0].values())
    made = a.autoscaling_config
    assert (made.min_replicas, made.max_replicas, made.target_ongoing_requests) == (0, 3, 4.0)
    assert (made.upscale_delay_s, made.downscale_delay_s) == (2, 600)
    assert made.downscale_to_zero_delay_s == 60 and c.num_replicas == 1
    assert list(ingress.init_args[0]) == ["a", "c"], "b is an application of its own, once it is asked"
    assert [group.replicas for group in ingress.init_kwargs["groups"]] == [1, 2, 1]


def test_an_impossible_plan_has_no_serve_config(models: Path) -> None:
    text = models.read_text()
    for wrong, says in (("draft_ahead", "draft_ahed"), ("draft_of", "draft_off"), ("tp_degree: 2", "tp_degree: 3")):
        models.write_text(text.replace(wrong, says))
        done = CliRunner().invoke(app, ["serve", str(models), "--instance", "inf2.48xlarge", "--print-serve-config"])
        assert done.exit_code == 2 and says.partition(":")[0] in done.stderr and not done.stdout
        with pytest.raises(PlanError):
            import_module("paceline.serving.ray_app").build({"models": str(models), "instance": "inf2.48xlarge"})


def placed(*line: str) -> ModelSpec:
    """The model of `paceline serve` with these options, as a replica gets it."""
    line = ("serve", *line, "--amp", "f32", "--name", "m", "--api-key", "s", "--print-serve-config")
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    (application,) = ServeDeploySchema(**yaml.safe_load(done.stdout)).applications
    assert application.args["api"] == {"api_keys": ["s"]}
    ingress = build(application.args)._bound_deployment
    assert ingress.init_args[1].api_keys == ("s",)
    deployment = ingress.init_args[0]["m"]._bound_deployment
    group, _, max_waiting = deployment.init_args
    (placement,) = group.plan.placements
    assert deployment._deployment_config.max_queued_requests == max_waiting == placement.model.max_waiting
    spec: ModelSpec = placement.model
    return spec


def test_a_model_without_a_file_has_every_option_of_a_target(workshop: Workshop) -> None:
    target, draft = str(workshop.checkpoint()), str(workshop.checkpoint("draft"))
    line = ["--target", target, "--draft", draft, "--k", "2", "--quantization", "int8", "--kv-cache-dtype", "fp8_e4m3"]
    more = ["--no-exact", "--no-fused", "--confidence-threshold", "0.25", "--vocabulary", "intersection"]
    model = placed(*line, *more, "--max-waiting", "7")
    assert (model.options.quantization, model.options.kv_cache_dtype, model.max_waiting) == ("int8", "fp8_e4m3", 7)
    asked = model.speculative
    found = (asked.draft[0].path, model.k, asked.exact, asked.fused, asked.confidence_threshold, asked.vocabulary)
    assert found == (draft, 2, False, False, 0.25, "intersection")
    usual = placed("--target", target)
    assert usual.max_waiting == 1024 and usual.speculative.exact and usual.options.quantization is None


def test_a_gguf_file_is_served_in_its_own_format(workshop: Workshop, tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "model.gguf", gguf_files.network(), gguf.GGMLQuantizationType.Q4_0)
    model = placed("--target", str(file), "--quantization", "gguf")
    assert model.options.quantization == "gguf" and model.folder == file
    settings = {"folder": file, "amp": "f32", "batch_size": 1, "n_positions": 64, "backend": "eager"}
    loaded = WorkerConfig.from_settings({**settings, "quantization": model.options.quantization}).load()
    packed = {module.format for module in loaded.body.modules() if isinstance(module, PackedMatrix)}
    assert packed == {WeightFormat.Q4_0}
    line = ["serve", "--target", workshop.checkpoint(), "--quantization", "gguf", "--print-serve-config"]
    refused("quantization: expected a GGUF file for gguf, which keeps", *line)


def test_a_fetched_model_needs_no_folder(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """`paceline serve --target smollm2`, as the README has it."""
    monkeypatch.setattr(hub, "fetched", lambda _row: workshop.checkpoint())
    assert placed("--target", "smollm2", "--backend", "eager").folder == workshop.checkpoint().resolve()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ([], "expected either a models file or --target DIR for a single"),
        (["--target", "x", "models.yaml"], "one of them"),
        (["--target", "MODEL", "--per-request-spec-decode-metrics", "all"], "got 'all'"),
    ],
)
def test_invalid_serve_arguments_are_rejected_before_a_start(workshop: Workshop, line: list[str], says: str) -> None:
    line = [str(workshop.checkpoint()) if word == "MODEL" else word for word in line]
    refused(says, "serve", *line)


def test_the_builder_rejects_unknown_arguments() -> None:
    for wrong in ({}, {"models": "m.yaml", "model": "x"}):
        with pytest.raises(ConfigurationError, match="args: expected `models`, `instance` and `api`, got"):
            build(wrong)
