"""`NeuronConfig`: how a decoder is loaded, read from the files of NxD Inference and transformers-neuronx.

A typed value with the names of this package, which goes to JSON and back. Keys that nobody knows raise; those that
change nothing here are in `without_effect`, each with the reason, and are logged. Not here: the application around it
(`paceline.application`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.auto import AutoDecoder, SamplingDecoder
from paceline.config import configuration_error
from paceline.core.errors import ConfigurationError
from paceline.decoder.options import AMP
from paceline.engine.request import SamplingParams
from paceline.neuron_config_keys import (
    KV_CACHES,
    KV_DEFAULT,
    KV_KEYS,
    REFUSED,
    SAMPLING_WITHOUT_EFFECT,
    WITHOUT_EFFECT,
)

log = logging.getLogger("paceline")

_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", **{name: name for name in AMP}}


class OnDeviceSampling(BaseModel):
    """The sampling that NxD compiles into a graph: here the defaults of `NeuronConfig.sampling_params`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    do_sample: bool = False
    temperature: float = Field(default=1.0, gt=0)
    top_k: int | None = None
    top_p: float | None = None
    eos_token_id: int | list[int] | None = None


class NeuronConfig(BaseModel):
    """How a decoder is loaded, and how it samples and speculates by default. Frozen.

    The first six are those of `AutoDecoder.from_pretrained`.

    on_device_sampling  defaults of sampling
    k                   drafted tokens of a round; None: the file asks for no speculation
    fused               whether draft and target are to be one graph; None: wherever that can be done
    draft_model_path    folder of the draft, where the file names it
    prefix_caching      whether prompts that begin alike read their common part once
    without_effect      keys of the file that change nothing here, and why

    Raises:
        ConfigurationError: a key is unknown, a value is out of range, or it asks for what is not to be had here.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: int = Field(default=1, ge=1)
    n_positions: int | list[int] | None = None
    context_length_estimate: int | list[int] | None = None
    amp: str = "bf16"
    tp_degree: int = Field(default=1, ge=1)
    group_query_attention: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
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
        options = _Reader(dict(fields)).read(
            source_fields.get("fused_spec_config") if "neuron_config" in source_fields else None
        )
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

    def load(self, path: str | os.PathLike[str], *, backend: str = "inductor") -> SamplingDecoder:
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
            kv_cache_dtype=self.kv_cache_dtype,
        )

    @property
    def sampling_params(self) -> SamplingParams:
        """How it samples by default."""
        sampling = self.on_device_sampling
        return SamplingParams() if sampling is None else SamplingParams(**sampling.model_dump())


class _Reader:
    """Reads the fields of one file. What is read is taken out; what is left over is unknown."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.without_effect: dict[str, str] = {}

    def read(self, fused_spec: Mapping[str, Any] | None) -> NeuronConfig:
        for name, (values, reason) in REFUSED.items():
            value = self.fields.pop(name, values[0])
            if value not in values:
                raise ConfigurationError(f"{name}={value!r} cannot be followed: {reason}")
        sampling, quantization = self._sampling(), self._quantization()
        positions, chunks = self._positions()
        sizes = [self.fields.pop(n, None) for n in ("batch_size", "tkg_batch_size", "max_batch_size")]
        length = self.fields.pop("speculation_length", 0)
        fused = self.fields.pop("enable_fused_speculation", None)
        options: dict[str, Any] = {
            "batch_size": max((size for size in sizes if size is not None), default=1),
            "n_positions": positions,
            "context_length_estimate": chunks,
            "amp": self._amp(),
            "tp_degree": self.fields.pop("tp_degree", 1),
            "group_query_attention": self.fields.pop("group_query_attention", None),
            "quantization": quantization,
            "kv_cache_dtype": self._kv_cache(),
            "on_device_sampling": sampling,
            "k": length - 1 if length > 1 else None,
            "fused": True if fused else None,
            "draft_model_path": None if fused_spec is None else fused_spec.get("draft_model_path"),
            "prefix_caching": bool(self.fields.pop("is_prefix_caching", None)),
        }
        for name in [name for name in self.fields if name in WITHOUT_EFFECT]:
            del self.fields[name]
            self.without_effect[name] = WITHOUT_EFFECT[name]
        if self.fields:
            names = ", ".join(sorted(self.fields))
            raise ConfigurationError(
                f"there is no option {names} in the NeuronConfig of NxD Inference or transformers-neuronx; correct the "
                "name, or leave it out"
            )
        return NeuronConfig(**options, without_effect=self.without_effect)

    def _amp(self) -> str:
        dtype = self.fields.pop("torch_dtype", None) or self.fields.pop("amp", None) or "bfloat16"
        self.fields.pop("amp", None)
        name = str(dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise ConfigurationError(f"torch_dtype={dtype!r} is unknown; use one of {', '.join(_DTYPES)}")
        return _DTYPES[name]

    def _positions(self) -> tuple[int | list[int] | None, int | list[int] | None]:
        """Buckets of the cache length and of prompts. Without bucketing there is one of each, as long as the text."""
        take = self.fields.pop
        length, longest, positions = take("seq_len", None), take("max_length", None), take("n_positions", None)
        token_buckets, buckets = take("token_generation_buckets", None), take("buckets", None)
        context, context_buckets = take("max_context_length", None), take("context_encoding_buckets", None)
        estimate, bucketing = take("context_length_estimate", None), take("enable_bucketing", None)
        end = next((value for value in (longest, length, positions) if value is not None), None)
        lengths = token_buckets or (buckets if buckets and list(buckets) != [end] else None)
        if lengths is None and positions is not None and not isinstance(positions, int):
            lengths = positions
        last = context if context is not None else length
        prompts = estimate if estimate is not None else context_buckets
        if prompts is None and last is not None:
            prompts = _powers(last) if bucketing else last
        if lengths is not None:
            last_position = end if isinstance(end, int) else max(lengths)
            return _ascending([*lengths, last_position]), _listed(prompts)
        # NxD's files say whether there are buckets; transformers-neuronx' n_positions always has them.
        return ([end] if bucketing is False and isinstance(end, int) else end), _listed(prompts)

    def _quantization(self) -> str | None:
        quantized, kind = self.fields.pop("quantized", False), self.fields.pop("quantization_type", None)
        dtype, quant = self.fields.pop("quantization_dtype", "int8"), self.fields.pop("quant", None)
        if isinstance(quant, Mapping):
            quantized, dtype = True, quant.get("quant_dtype")
            self.without_effect["quant"] = "its dequant_dtype and quantize_method: products are float32, scales per row"
        if not quantized:
            return None
        whole = kind == "per_tensor_symmetric"
        if dtype in ("int8", "s8"):
            return "int8_per_tensor" if whole else "int8"
        if dtype not in ("f8e4m3", "f8e5m2"):
            raise ConfigurationError(
                f"quantization_dtype={dtype!r} cannot be followed: weights are int8, f8e4m3, f8e5m2, or blocks of 8 or "
                "4 bits (quantization='q8_0', 'q4_0')"
            )
        if whole:
            self.without_effect["quantization_type"] = "of 8-bit floats, every row has a scale: per_channel_symmetric"
        return f"fp8_{dtype[2:]}"

    def _kv_cache(self) -> str | None:
        """Of NxD's kv_quant_config (`KVQuantizationConfig`), or of kv_cache_quant: NxD's flag, an object before it."""
        quant, config = self.fields.pop("kv_cache_quant", None), self.fields.pop("kv_quant_config", None)
        name, asked = ("kv_cache_quant", quant) if config is None else ("kv_quant_config", config)
        if not isinstance(asked, Mapping):
            if config is not None:
                raise ConfigurationError(f"kv_quant_config is a {type(config).__name__}; it must be an object")
            return KV_CACHES[KV_DEFAULT] if asked else None
        if unknown := sorted(map(str, asked.keys() - KV_KEYS[name])):
            raise ConfigurationError(f"{name} has no option {', '.join(unknown)}; it has {', '.join(KV_KEYS[name])}")
        dtype = str(asked.get("quant_dtype", KV_DEFAULT)).removeprefix("torch.")
        if dtype not in KV_CACHES:
            raise ConfigurationError(
                f"{name}: quant_dtype={dtype!r} cannot be followed: keys and values are {', '.join(KV_CACHES)}"
            )
        rest = " and ".join(key for key in KV_KEYS[name] if key in asked and key != "quant_dtype")
        if rest:
            self.without_effect[name] = f"its {rest}: every row of a head has a scale"
        return KV_CACHES[dtype]

    def _sampling(self) -> OnDeviceSampling | None:
        sampling = self.fields.pop("on_device_sampling_config", None) or self.fields.pop("on_device_generation", None)
        self.fields.pop("on_device_generation", None)
        if sampling is None:
            return None
        if not isinstance(sampling, Mapping):
            raise ConfigurationError(f"on_device_sampling_config is a {type(sampling).__name__}; it must be an object")
        fields = dict(sampling)
        for name in [name for name in fields if name in SAMPLING_WITHOUT_EFFECT]:
            del fields[name]
            self.without_effect[f"on_device_sampling_config.{name}"] = SAMPLING_WITHOUT_EFFECT[name]
        try:
            return OnDeviceSampling(**fields)
        except ValidationError as error:
            raise configuration_error(error, OnDeviceSampling) from error


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


def _listed(value: int | Sequence[int] | None) -> int | list[int] | None:
    return value if value is None or isinstance(value, int) else _ascending(value)


def _ascending(numbers: Sequence[int]) -> list[int]:
    return sorted({*numbers})


def _powers(last: int) -> list[int]:
    """NxD's buckets: 128, 256, ... and the last one itself."""
    powers = [128]
    while powers[-1] * 2 < last:
        powers.append(powers[-1] * 2)
    return _ascending([*(bucket for bucket in powers if bucket < last), last])
