"""Names of other programs, as these have them: variables of the environment, resources, metrics, and fields of HTTP.

A misspelt name fails nowhere: it is one that nobody reads. So each name that stands in the code or in the documents is
compared with the program that owns it, or with its documented text where the program is not installed here.
"""

from __future__ import annotations

import mmap
import re
import typing
from pathlib import Path

import huggingface_hub
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import openai.types.responses.response_create_params as responses_params
import pytest
import ray
from ray._common import constants as ray_constants
from ray._private.accelerators import neuron

from paceline.placement.cluster.nodes import RESOURCE
from paceline.placement.host import environment
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.instances import INSTANCES
from paceline.serving import metrics, ray_app
from paceline.serving.openai.requests import ChatRequest, CompletionRequest, ResponsesRequest
from paceline.serving.parsers import REASONING
from paceline.serving.tool_formats import TOOL_FORMATS
from tests.house.test_structure import REPOSITORY

NEURON = {
    # https://awsdocs-neuron.readthedocs-hosted.com/en/latest/neuron-runtime/api/nrt-env-var-reference.html
    "NEURON_RT_VISIBLE_CORES", "NEURON_RT_ROOT_COMM_ID", "NEURON_RT_EXEC_TIMEOUT", "NEURON_RT_STOCHASTIC_ROUNDING_EN",
    "NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE", "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS",
    # .../tools/neuron-sys-tools/neuron-monitor-user-guide.html: a string of 32 characters
    "NEURON_PROCESS_TAG",
    # the developer guide of transformers-neuronx, on pipelines; the page says that nothing takes their place
    "NEURON_RANK_ID", "NEURON_LOCAL_TP", "NEURON_PP_STAGES",
    # .../frameworks/torch/torch-neuronx/api-reference-guide/training/torch-neuron-envvars.html, .../torch/reference
    "NEURON_COMPILE_CACHE_URL", "NEURON_PLATFORM_TARGET_OVERRIDE", "TORCH_NEURONX_COMPILE_ONLY",
    "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY",
}  # fmt: skip
OPENMP = {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}  # OpenMP 5.2, chapter 21; libgomp's manual
VLLM = {  # docs.vllm.ai, "Metrics", and vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens", "generation_tokens",
    "prefix_cache_queries", "prefix_cache_hits", "request_success", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
}  # fmt: skip
TOOL_PARSERS = {  # vllm/tool_parsers/__init__.py
    *("deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "cohere_command3", "cohere_command4", "ernie45"),
    *("glm45", "glm47", "granite-20b-fc", "granite", "granite4", "hermes", "poolside_v1", "hunyuan_a13b", "hy_v3"),
    *("internlm", "jamba", "lfm2", "kimi_k2", "kimi_k3", "llama3_json", "llama4_json", "llama4_pythonic", "longcat"),
    *("mimo", "minimax_m2", "minimax_m3", "minicpm5", "mistral", "olmo3", "openai", "phi4_mini_json", "pythonic"),
    *("qwen3_coder", "qwen3_xml", "seed_oss", "step3", "step3p5", "inkling", "xlam", "gigachat3", "functiongemma"),
    *("gemma4", "apertus", "solar_open2"),
}
OWN_FORMATS = {  # without a parser there, or with one of several forms
    *("muse_glimmer", "solar_open", "cohere2", "nemotron_json", "minimax", "functools", "gigachat3_10b", "functionary"),
    "functionary_v3",
}
REASONING_PARSERS = {"deepseek_r1", "mistral", "seed_oss"}  # vllm/reasoning/__init__.py, those of our markers
OWN_FIELDS = {  # of vLLM, and of this project
    "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "prompt_logprobs", "structured_outputs",
    "chat_template_kwargs", "return_token_ids",
    "speculative", "return_token_origins", "add_generation_prompt", "continue_final_message",
}  # fmt: skip
_NAME = re.compile(r"\b(?:NEURON|RAY|TORCH_NEURONX|HF|OMP|GOMP|PJRT|XLA)_[A-Za-z0-9_]+\b")
_OURS = {"RAY_ERRORS", "NEURON_DOUBLE_CORES"}  # constants of ours, and of the stand-in for the runtime


def written() -> dict[str, str]:
    """Each name of the environment that stands in the code or the documents, and a file where it does."""
    files = [path for end in ("py", "md", "sh", "yaml") for path in REPOSITORY.rglob(f"*.{end}")]
    names: dict[str, str] = {}
    for path in files:
        inside = path.relative_to(REPOSITORY)
        if path != Path(__file__) and not inside.parts[0].startswith((".", "build", "dist")):
            names |= {name: str(inside) for name in _NAME.findall(path.read_text(encoding="utf-8", errors="replace"))}
    return names


def test_ray_variables_exist_in_ray() -> None:
    """In its Python, or in what is compiled: ``RAY_name`` sets the value ``name`` of its C++ configuration."""
    package = Path(ray.__file__).parent
    files = (path for folder in ("_common", "_private", "serve") for path in package.glob(f"{folder}/**/*.py"))
    source = "\n".join(path.read_text() for path in files)
    with (package / "core/src/ray/raylet/raylet").open("rb") as file:
        compiled = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for name, where in written().items():
            if name.startswith("RAY_") and name not in _OURS:
                known = f'"{name}"' in source or compiled.find(name.removeprefix("RAY_").encode() + b"\0") >= 0
                assert known or compiled.find(name.encode() + b"\0") >= 0, f"{name} in {where} is no variable of Ray"


def test_ray_names_equal_rays_constants() -> None:
    manager = neuron.NeuronAcceleratorManager
    assert neuron.NOSET_AWS_NEURON_RT_VISIBLE_CORES_ENV_VAR == environment.NOSET
    assert manager.get_visible_accelerator_ids_env_var() == environment.CORES
    assert manager.get_resource_name() == RESOURCE
    assert ray_constants.HEAD_NODE_RESOURCE_NAME == ray_app._HERE


@pytest.mark.parametrize(("prefixes", "known"), [(("NEURON_", "TORCH_NEURONX_"), NEURON), (("OMP_", "GOMP_"), OPENMP)])
def test_variables_of_runtimes_are_documented(prefixes: tuple[str, ...], known: set[str]) -> None:
    found = {name for name in written() if name.startswith(prefixes)} - _OURS
    assert found and not found - known, {name: where for name, where in written().items() if name in found - known}


def test_hub_variables_exist_in_the_client() -> None:
    source = "\n".join(path.read_text() for path in Path(huggingface_hub.__file__).parent.glob("**/*.py"))
    found = {name for name in written() if name.startswith("HF_")}
    assert found and all(f'"{name}"' in source for name in found), found


def test_a_tag_is_no_longer_than_the_monitor_reads() -> None:
    machine = INSTANCES["inf2.48xlarge"]
    variables = dict(environment.planned(machine, CoreRange(0, 1), label="a" * 60, threads=1))
    assert len(variables["NEURON_PROCESS_TAG"]) == 32


def test_vllm_metric_names_exist_in_vllm() -> None:
    names = [metric.name for metric in metrics.METRICS]
    assert {name.removeprefix("vllm:") for name in names if name.startswith("vllm:")} == VLLM


def test_formats_of_calls_have_the_names_of_vllms_parsers() -> None:
    names = {row.name for row in TOOL_FORMATS}
    assert names - TOOL_PARSERS == OWN_FORMATS and not OWN_FORMATS & TOOL_PARSERS
    assert {row.name for row in REASONING} == REASONING_PARSERS


def test_variables_of_xla_are_documented() -> None:
    """In "PJRT Runtime" of torch_xla's documents and in XLA's, and a constant of torch-neuronx."""
    known = {"PJRT_DEVICE", "XLA_FLAGS", "XLA_DTYPE_TO_METANEFF_DTYPE"}
    assert {name for name in written() if name.startswith(("PJRT_", "XLA_"))} <= known


def test_request_fields_exist_in_openais_client() -> None:
    """Fields of any of its endpoints: sampling fields, for one, are accepted by all of ours."""
    params = (
        *(chat_params.CompletionCreateParamsBase, chat_params.CompletionCreateParamsStreaming),
        *(completion_params.CompletionCreateParamsBase, completion_params.CompletionCreateParamsStreaming),
        *(responses_params.ResponseCreateParamsBase, responses_params.ResponseCreateParamsStreaming),
    )
    theirs = {name for one in params for name in typing.get_type_hints(one)}
    ours = {name for one in (ChatRequest, CompletionRequest, ResponsesRequest) for name in one.model_fields}
    assert ours - theirs == OWN_FIELDS
