"""`NeuronConfig`: how a decoder is loaded, read from the files of NxD Inference and transformers-neuronx.

A typed value with the names of this package, which goes to JSON and back. Keys that nobody knows raise; those that
change nothing here are in `without_effect`, each with the reason, and are logged. Not here: the application around it
(`paceline.application`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.auto import AutoDecoder, SamplingDecoder
from paceline.config import configuration_error
from paceline.core.errors import ConfigurationError
from paceline.engine.request import SamplingParams
from paceline.neuron_config_reader import Reader

log = logging.getLogger("paceline")

Layout = Literal["shard-over-heads", "replicated-heads", "all-gather-heads", "shard-over-batch"]
Matrices = Literal["int8", "int8_per_tensor", "fp8_e4m3", "fp8_e5m2", "q8_0", "q4_0", "q4_1", "gguf"]


class OnDeviceSampling(BaseModel):
    """The sampling that NxD compiles into a graph: here the defaults of `NeuronConfig.sampling_params`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    do_sample: bool = False
    temperature: float = Field(default=1.0, gt=0)
    top_k: int | None = None
    top_p: float | None = None
    eos_token_id: int | list[int] | None = None


Slots = Annotated[int, Field(ge=1)]


class NeuronConfig(BaseModel):
    """How a decoder is loaded, and how it samples and speculates by default. Frozen.

    Down to kv_cache_dtype they are those of `AutoDecoder.from_pretrained`.

    on_device_sampling  defaults of sampling
    modules_to_not_convert  tables of the vocabulary that are not quantised: "lm_head", "embed_tokens"
    k                   drafted tokens of a round; None: the file asks for no speculation
    fused               whether draft and target are to be one graph; None: wherever that can be done
    draft_model_path    folder of the draft, where the file names it
    prefix_caching      whether prompts that begin alike read their common part once
    without_effect      keys of the file that change nothing here, and why

    Raises:
        ConfigurationError: a key is unknown, a value is out of range, or it asks for what is not to be had here.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    batch_size: Slots | list[Slots] = 1
    n_positions: int | list[int] | None = None
    context_length_estimate: int | list[int] | None = None
    amp: Literal["bf16", "f16", "f32"] = "bf16"
    tp_degree: int = Field(default=1, ge=1)
    group_query_attention: Layout | None = None
    quantization: Matrices | None = None
    modules_to_not_convert: list[str] = Field(default_factory=list)
    kv_cache_dtype: Literal["int8", "fp8_e4m3", "fp8_e5m2"] | None = None
    on_device_sampling: OnDeviceSampling | None = None
    k: int | None = Field(default=None, ge=1)
    fused: bool | None = None
    draft_model_path: str | None = None
    prefix_caching: bool = False
    without_effect: dict[str, str] = Field(default_factory=dict)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise configuration_error(error, type(self)) from error

    @classmethod
    def from_neuron_config(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> NeuronConfig:
        """Read a configuration of NxD Inference or transformers-neuronx.

        source  a mapping, JSON as text, a file, or a folder with neuron_config.json: the whole file that
                ``InferenceConfig.save`` writes, or the fields of a NeuronConfig alone

        Raises:
            ConfigurationError: it is no such configuration, a key is unknown, or a value cannot be followed.
        """
        source_fields = _read(source)
        fields = source_fields.get("neuron_config", source_fields)
        if not isinstance(fields, Mapping):
            raise ConfigurationError(f"neuron_config is a {type(fields).__name__}; it must be an object of fields")
        fused_spec = source_fields.get("fused_spec_config") if "neuron_config" in source_fields else None
        if fused_spec is not None and not isinstance(fused_spec, Mapping):
            raise ConfigurationError(f"fused_spec_config is a {type(fused_spec).__name__}; it must be an object")
        reader = Reader(dict(fields))
        found = reader.read(fused_spec)
        if (sampling := found["on_device_sampling"]) is not None:
            try:
                found["on_device_sampling"] = OnDeviceSampling(**sampling)
            except ValidationError as error:
                raise configuration_error(error, OnDeviceSampling) from error
        options = cls(**found, without_effect=reader.without_effect)
        for name, reason in options.without_effect.items():
            log.info("%s has no effect here: %s", name, reason)
        return options

    @classmethod
    def from_json(cls, text: str) -> NeuronConfig:
        """What `to_json` wrote.

        Raises:
            ConfigurationError: a key is unknown, or a value is out of range.
        """
        fields = _json(text, "the text")
        return cls(**fields)

    def to_json(self) -> str:
        """As JSON, with the names of this package."""
        return self.model_dump_json(indent=2)

    def load(self, path: str | os.PathLike[str], *, backend: str = "native") -> SamplingDecoder:
        """`AutoDecoder.from_pretrained` with these options; errors as there."""
        return AutoDecoder.from_pretrained(
            path,
            batch_size=self.batch_size,
            n_positions=self.n_positions,
            context_length_estimate=self.context_length_estimate,
            amp=self.amp,
            backend=backend,
            tp_degree=self.tp_degree,
            group_query_attention=self.group_query_attention,
            quantization=self.quantization,
            modules_to_not_convert=self.modules_to_not_convert,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    @property
    def sampling_params(self) -> SamplingParams:
        """How it samples by default."""
        sampling = self.on_device_sampling
        return SamplingParams() if sampling is None else SamplingParams(**sampling.model_dump())


def _read(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return _json(source, "the text")
    path = Path(source)
    file = path / "neuron_config.json" if path.is_dir() else path
    try:
        return _json(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read ({error}); give the neuron_config.json of a model") from error


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{where} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigurationError(f"{where} is a {type(fields).__name__}; it must be a JSON object")
    return fields
