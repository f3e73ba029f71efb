"""`NeuronConfig`: loading options of a decoder, read from the files of NxD Inference and transformers-neuronx.

Unknown keys raise; keys without an effect in Paceline are in `without_effect`, each with the reason, and are logged.
`paceline.application` uses it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.auto import SamplingDecoder, load
from paceline.config import configuration_error
from paceline.core.errors import ConfigurationError
from paceline.decoder.options import AMP, LoadOptions
from paceline.engine.request import SamplingParams
from paceline.loadable import loadable

log = logging.getLogger("paceline")

NUMBER, NUMBERS = "a number, 0 or more", "a list of numbers"


@dataclass(frozen=True, slots=True)
class KeyTables:
    """The keys of `neuronx_distributed_inference/models/config.py` and `transformers_neuronx/config.py` that have no
    counterpart in Paceline, from ``neuron_config_keys.json``. A file with a value outside its key's set is not one that
    those projects read, so its meaning is unknown.

    without_effect   key -> reason why it has no effect; ``sampling_without_effect``: of NxD's sampling
    values           key -> type of its value; keys not listed: true or false
    choices          key -> allowed words; a number format may begin with "torch."
    refused          keys that would change the computation -> the accepted values, and the remedy for others
    quant            fields of transformers-neuronx' QuantizationConfig -> accepted values (None: any), and why no
    others
    kv_caches        both projects' names of the type -> `kv_cache_dtype`
    kv_keys          the fields of the quantization of keys and values
    """

    without_effect: Mapping[str, str]
    sampling_without_effect: Mapping[str, str]
    values: Mapping[str, str]
    choices: Mapping[str, Sequence[str]]
    refused: Mapping[str, tuple[Sequence[Any], str]]
    quant: Mapping[str, tuple[Sequence[Any] | None, str]]
    kv_caches: Mapping[str, str]
    kv_keys: Mapping[str, Sequence[str]]


@cache
def key_tables() -> KeyTables:
    file = files("paceline").joinpath("neuron_config_keys.json").read_text(encoding="utf-8")
    data = json.loads(file)
    inverted = {
        table: {key: told for told, keys in data[table].items() for key in keys}
        for table in ("without_effect", "sampling_without_effect", "values")
    }
    return KeyTables(
        **inverted,
        choices={key: row["words"] for row in data["choices"] for key in row["keys"]},
        refused={key: (values, reason) for reason, keys in data["refused"].items() for key, values in keys.items()},
        quant={key: (row["values"], row["reason"]) for key, row in data["quant"].items()},
        kv_caches=data["kv_caches"],
        kv_keys=data["kv_keys"],
    )


class OnDeviceSampling(BaseModel):
    """The sampling that NxD compiles into a graph: in Paceline the defaults of `NeuronConfig.sampling_params`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    do_sample: bool = False
    temperature: float = Field(default=1.0, gt=0)
    top_k: int | None = None
    top_p: float | None = None
    eos_token_id: int | list[int] | None = None


class _ReadsForeignKeys(type):
    """Makes `NeuronConfig(seq_len=...)`, with a key of NxD Inference or transformers-neuronx, a reader of all keys."""

    def __call__(cls, *arguments: Any, **keys: Any) -> Any:
        assert issubclass(cls, NeuronConfig)
        keys = {name: _plain(value) for name, value in keys.items()}
        if not keys.keys() <= {one.name for one in fields(cls)}:
            return cls.from_neuron_config(keys)
        return super().__call__(*arguments, **keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronConfig(LoadOptions, metaclass=_ReadsForeignKeys):
    """Loading options of a decoder, and its defaults of sampling and speculation.

    on_device_sampling  defaults of sampling
    k                   drafted tokens per round; None: the file has no speculation
    fused               whether draft and target are one graph; None: if possible
    draft_model_path    folder of the draft, if the file names it
    prefix_caching      whether a prefix shared by prompts is prefilled once
    without_effect      keys of the file without an effect in Paceline, and why

    Raises:
        ConfigurationError: a value is out of range, or it needs an unsupported feature.
    """

    on_device_sampling: OnDeviceSampling | None = None
    k: int | None = None
    fused: bool | None = None
    draft_model_path: str | None = None
    prefix_caching: bool = False
    without_effect: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        LoadOptions.__post_init__(self)
        _check("fused", self.fused, "true or false")
        _check("prefix_caching", self.prefix_caching, "true or false")
        _check("k", self.k, NUMBER)
        if self.k == 0:
            raise ConfigurationError("k: expected at least 1, got 0; raise it, or omit it")

    @classmethod
    def from_neuron_config(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> NeuronConfig:
        """Read a configuration of NxD Inference or transformers-neuronx.

        source  a mapping, JSON as text, a file, or a folder with neuron_config.json: the whole file that
                ``InferenceConfig.save`` writes, or only the fields of a NeuronConfig

        Raises:
            ConfigurationError: it is not such a configuration, a key is unknown, or a value is not supported.
        """
        source_fields = _read(source)
        fields = source_fields.get("neuron_config", source_fields)
        if not isinstance(fields, Mapping):
            raise ConfigurationError(
                f"neuron_config: expected an object of fields, got a {type(fields).__name__}; correct it"
            )
        fused_spec = source_fields.get("fused_spec_config") if "neuron_config" in source_fields else None
        if fused_spec is not None and not isinstance(fused_spec, Mapping):
            raise ConfigurationError(
                f"fused_spec_config: expected an object, got a {type(fused_spec).__name__}; correct it"
            )
        reader = _Reader(dict(fields))
        found = reader.read(fused_spec)
        options = cls(
            **found | {"on_device_sampling": _sampling(found["on_device_sampling"])},
            without_effect=reader.without_effect,
        )
        for name, reason in options.without_effect.items():
            log.info("%s has no effect in Paceline: %s", name, reason)
        return options

    @classmethod
    def from_json(cls, text: str) -> NeuronConfig:
        """Read the output of `to_json`."""
        fields = _json(text, "the text")
        config = cls.of(fields | {"on_device_sampling": _sampling(fields.get("on_device_sampling"))})
        assert isinstance(config, cls)
        return config

    def to_json(self) -> str:
        sampling = None if self.on_device_sampling is None else self.on_device_sampling.model_dump()
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return json.dumps(values | {"on_device_sampling": sampling}, indent=2)

    @property
    def load_options(self) -> LoadOptions:
        return LoadOptions(**{one.name: getattr(self, one.name) for one in fields(LoadOptions)})

    def load(self, path: str | os.PathLike[str], *, backend: str | None = None) -> SamplingDecoder:
        """Call `AutoDecoder.from_pretrained` with these options, or with another backend; same errors."""
        options = self.load_options
        return load(loadable(path, options if backend is None else replace(options, backend=backend)))

    @property
    def sampling_params(self) -> SamplingParams:
        sampling = self.on_device_sampling
        return SamplingParams() if sampling is None else SamplingParams(**sampling.model_dump())


def OnDeviceSamplingConfig(**fields: object) -> dict[str, object]:  # noqa: N802  NxD Inference's name
    """Return the fields of NxD Inference's class, for ``NeuronConfig(on_device_sampling_config=...)``."""
    return fields


def FusedSpecNeuronConfig(  # noqa: N802  NxD Inference's name
    worker_cls: object = None,  # noqa: ARG001  the draft's folder tells it, and its configuration
    draft_config: object = None,  # noqa: ARG001
    draft_model_path: str | None = None,
) -> dict[str, object]:
    """Return the draft's path, for `InferenceConfig`."""
    return {"draft_model_path": draft_model_path}


def InferenceConfig(  # noqa: N802  NxD Inference's name
    neuron_config: NeuronConfig | Mapping[str, Any],
    fused_spec_config: Mapping[str, Any] | None = None,
    load_config: object = None,  # noqa: ARG001  the model's folder has it
) -> NeuronConfig:
    """Return the options, with the draft of ``fused_spec_config``."""
    if isinstance(neuron_config, NeuronConfig):
        return replace(neuron_config, draft_model_path=(fused_spec_config or {}).get("draft_model_path"))
    return NeuronConfig.from_neuron_config({"neuron_config": neuron_config, "fused_spec_config": fused_spec_config})


def _sampling(fields: object) -> OnDeviceSampling | None:
    try:
        return None if fields is None else OnDeviceSampling.model_validate(fields)
    except ValidationError as error:
        raise configuration_error(error, OnDeviceSampling) from error


def _is(value: object, wanted: str) -> bool:
    """Whether a value is of a kind, given by its name in messages. True and false are not numbers."""
    if wanted == NUMBER:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if wanted == NUMBERS:
        return isinstance(value, (list, tuple)) and bool(value) and all(_is(one, NUMBER) for one in value)
    kinds: dict[str, Any] = {"true or false": bool, "a list": (list, tuple), "a text": str, "an object": Mapping}
    return wanted == "anything" or isinstance(value, kinds[wanted])


def _check(name: str, value: Any, wanted: str) -> Any:
    if value is None or _is(value, wanted):
        return value
    if wanted == "an object":
        raise ConfigurationError(f"{name}: expected an object, got a {type(value).__name__}; correct it")
    raise ConfigurationError(f"{name}: expected {wanted}, got {value!r}; correct it")


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
        raise ConfigurationError(
            f"{file}: the file cannot be read ({error}); give the neuron_config.json of a model"
        ) from error


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{where}: expected JSON, got {error}; correct it") from error
    if not isinstance(fields, dict):
        raise ConfigurationError(f"{where}: expected a JSON object, got a {type(fields).__name__}; correct it")
    return fields


_DTYPES = {**{torchs: ours for ours, torchs in AMP.items()}, **{name: name for name in AMP}}
_WHOLE, _CHANNEL = "per_tensor_symmetric", "per_channel_symmetric"
_KV_DEFAULT = "float8_e4m3fn"  # NxD's type of keys and values, if none is named


class _Reader:
    """Reads the fields of one file, as the options of `NeuronConfig`. Keys that are read are removed; the remaining
    ones are unknown.

    without_effect  keys that have no effect, and why
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields, self.tables = {name: _plain(value) for name, value in fields.items()}, key_tables()
        self.without_effect: dict[str, str] = {}

    def read(self, fused_spec: Mapping[str, Any] | None) -> dict[str, Any]:
        self._refuse()
        quantization, left_alone = self._quantization()
        positions, chunks = self._positions()
        length = self._take("speculation_length", NUMBER) or 0
        fused = self._take("enable_fused_speculation", "true or false")
        options: dict[str, Any] = {
            "batch_size": self._batches(),
            "n_positions": positions,
            "context_length_estimate": chunks,
            "amp": self._amp(),
            "tp_degree": self.fields.pop("tp_degree", 1),
            "group_query_attention": self.fields.pop("group_query_attention", None),
            "quantization": quantization,
            "modules_to_not_convert": left_alone,
            "kv_cache_dtype": self._kv_cache(),
            "on_device_sampling": self._sampling(),
            "k": length - 1 if length > 1 else None,
            # A file without speculation has the flag, too, and then it means nothing.
            "fused": fused if fused or length > 1 else None,
            "draft_model_path": None if fused_spec is None else fused_spec.get("draft_model_path"),
            "prefix_caching": bool(self._take("is_prefix_caching", "true or false")),
        }
        self._leave_out()
        if self.fields:
            names = ", ".join(sorted(self.fields))
            raise ConfigurationError(
                f"{names}: not an option in the NeuronConfig of NxD Inference or transformers-neuronx; correct the "
                "name, or omit it"
            )
        return options

    def _refuse(self) -> None:
        for name, (values, reason) in self.tables.refused.items():
            value = self.fields.pop(name, values[0])
            if not any(value == one and type(value) is type(one) for one in values):
                raise ConfigurationError(f"{name}: {value!r} is not supported ({reason}); omit it")

    def _leave_out(self) -> None:
        tables = self.tables
        for name in [name for name in self.fields if name in tables.without_effect]:
            value = self.fields.pop(name)
            words = tables.choices.get(name)
            wanted = tables.values.get(name, "true or false") if words is None else f"one of {', '.join(words)}"
            known = _is(value, wanted) if words is None else str(value).removeprefix("torch.") in words
            if value is not None and not known:
                raise ConfigurationError(f"{name}: expected {wanted}, got {value!r}; use one of these")
            self.without_effect[name] = tables.without_effect[name]

    def _take(self, name: str, wanted: str) -> Any:
        return _check(name, self.fields.pop(name, None), wanted)

    def _amp(self) -> str:
        dtype = self.fields.pop("torch_dtype", None) or self.fields.pop("amp", None) or "bfloat16"
        self.fields.pop("amp", None)
        name = str(dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise ConfigurationError(
                f"torch_dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r}; use one of them"
            )
        return _DTYPES[name]

    def _batches(self) -> int | list[int]:
        """The slots, or the numbers of slots with a separate graph, if the file lists them."""
        listed, own = self._take("token_generation_batches", NUMBERS) or [], self._one_or_more("batch_size")
        if isinstance(own, (list, tuple)):  # those of transformers-neuronx
            listed, own = [*listed, *own], None
        sizes = [own, self._take("tkg_batch_size", NUMBER), self._take("max_batch_size", NUMBER)]
        most = max([size for size in sizes if size is not None] or listed or [1])
        if listed and max(listed) > most:
            raise ConfigurationError(
                f"token_generation_batches: expected at most {most} slots (batch_size), got {max(listed)}; raise "
                "batch_size, or remove that number"
            )
        return sorted({*listed, most}) if listed else most

    def _positions(self) -> tuple[int | list[int] | None, int | list[int] | None]:
        """The buckets of the cache length and of prompts. Without bucketing there is one of each, of the sequence's
        length.
        """
        names = ("seq_len", "max_length", "max_context_length")
        length, longest, context = (self._take(name, NUMBER) for name in names)
        token_buckets, buckets, context_buckets = (
            self._take(name, NUMBERS) for name in ("token_generation_buckets", "buckets", "context_encoding_buckets")
        )
        positions, estimate = self._one_or_more("n_positions"), self._one_or_more("context_length_estimate")
        bucketing = self._take("enable_bucketing", "true or false")
        end = next((value for value in (longest, length, positions) if value is not None), None)
        lengths = token_buckets or (buckets if buckets and buckets != [end] else None)
        if lengths is None and positions is not None and not isinstance(positions, int):
            lengths = positions
        last = context if context is not None else length
        prompts = estimate if estimate is not None else context_buckets
        if prompts is None and last is not None:
            prompts = _powers(last) if bucketing else last
        if prompts is not None and not isinstance(prompts, int):
            prompts = sorted({*prompts})
        if lengths is not None:
            last_position = end if isinstance(end, int) else max(lengths)
            return sorted({*lengths, last_position}), prompts
        # NxD's files have a switch for buckets; transformers-neuronx' n_positions always has them.
        return ([end] if bucketing is False and isinstance(end, int) else end), prompts

    def _one_or_more(self, name: str) -> Any:
        value = self.fields.get(name)
        return self._take(name, NUMBER if value is None or isinstance(value, int) else NUMBERS)

    def _quantization(self) -> tuple[str | None, list[str]]:
        """The format of the matrices, and the modules that keep that of ``amp``. If a file of NxD Inference names no
        type or no dtype, its default applies.
        """
        quantized, quant = self._take("quantized", "true or false"), self._take("quant", "an object")
        kind, dtype = self.fields.pop("quantization_type", None), self.fields.pop("quantization_dtype", None)
        left_alone = self.fields.pop("modules_to_not_convert", None)
        kind, dtype = _WHOLE if kind is None else kind, "int8" if dtype is None else dtype
        if quant is not None:
            if quantized:
                raise ConfigurationError(
                    "quant: expected either quant (transformers-neuronx) or quantized (NxD Inference), got both; "
                    "give one"
                )
            quantized, kind, dtype = True, _CHANNEL, self._quant(quant)
        if kind not in (_WHOLE, _CHANNEL):
            raise ConfigurationError(
                f"quantization_type: expected {_CHANNEL} or {_WHOLE}, got {kind!r}; use one of them, or load blocks "
                "with quantization='q8_0', 'q4_0' or 'q4_1' of AutoDecoder.from_pretrained"
            )
        names = [] if left_alone is None else left_alone
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise ConfigurationError(
                f"modules_to_not_convert: expected a list of names, got {left_alone!r}; correct it"
            )
        if dtype not in ("int8", "s8", "f8e4m3", "f8e5m2", "f8e4m3fn"):
            raise ConfigurationError(
                f"quantization_dtype: expected int8, f8e4m3 or f8e5m2, got {dtype!r}; use one of them, or blocks of "
                "8 or 4 bits (quantization='q8_0', 'q4_0')"
            )
        if not quantized:
            return None, []
        return "int8" if dtype in ("int8", "s8") else "fp8_e4m3", list(names)

    def _quant(self, quant: Mapping[str, object]) -> object:
        known = self.tables.quant
        for name, value in quant.items():
            if name not in known:
                raise ConfigurationError(f"quant: {name} is not an option; use {', '.join(known)}")
            values, reason = known[name]
            if values is not None and value not in values:
                raise ConfigurationError(f"quant: {name}: {value!r} is not supported ({reason}); omit it")
        if "dequant_dtype" in quant:
            self.without_effect["quant"] = f"its dequant_dtype: {known['dequant_dtype'][1]}"
        return quant.get("quant_dtype", "s8")

    def _kv_cache(self) -> str | None:
        """The cache type of NxD's kv_quant_config (`KVQuantizationConfig`), or of kv_cache_quant, a flag or
        an object.
        """
        caches, config = self.tables.kv_caches, self._take("kv_quant_config", "an object")
        name = "kv_cache_quant" if config is None else "kv_quant_config"
        quant = self.fields.pop("kv_cache_quant", None)
        asked = quant if config is None else config
        if not isinstance(asked, Mapping):
            return caches[_KV_DEFAULT] if _check(name, asked, "true or false") else None
        keys = self.tables.kv_keys[name]
        if unknown := sorted(map(str, asked.keys() - set(keys))):
            raise ConfigurationError(f"{name}: {', '.join(unknown)} is not an option; use {', '.join(keys)}")
        dtype = str(asked.get("quant_dtype", _KV_DEFAULT)).removeprefix("torch.")
        if dtype not in caches:
            raise ConfigurationError(
                f"{name}: quant_dtype: expected {', '.join(caches)} for keys and values, got {dtype!r}; use one of them"
            )
        rest = " and ".join(key for key in keys if key in asked and key != "quant_dtype")
        if rest:
            self.without_effect[name] = f"its {rest}: every row of a head has a scale"
        return caches[dtype]

    def _sampling(self) -> dict[str, object] | None:
        sampling = self.fields.pop("on_device_sampling_config", None) or self.fields.pop("on_device_generation", None)
        self.fields.pop("on_device_generation", None)
        if sampling is None:
            return None
        fields, known = _check("on_device_sampling_config", sampling, "an object"), self.tables.sampling_without_effect
        told = {f"on_device_sampling_config.{name}": known[name] for name in fields if name in known}
        self.without_effect |= told
        return {name: value for name, value in fields.items() if name not in known}


def _plain(value: Any) -> Any:
    """The value of an Enum's member: those projects' GQA and Layout have members of the same values."""
    return value.value if isinstance(value, Enum) else value


def _powers(last: int) -> list[int]:
    """NxD's buckets: 128, 256, ... and the last one itself."""
    powers = [128]
    while powers[-1] * 2 < last:
        powers.append(powers[-1] * 2)
    return sorted({*(bucket for bucket in powers if bucket < last), last})
