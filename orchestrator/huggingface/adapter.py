"""`HuggingFaceGenerationAdapter`: a decoder or a generator as a model of `transformers`.

Its `generate` is that of `transformers`: it prepares arguments, `GenerationConfig`, processors, criteria and streamers.
Then one of two loops runs:

    transformers' own loops, on `forward`   greedy, sampling, beam search of a decoder
    our engine (`engine_call`)              calls with speculation: a generator, `assistant_model`,
    `prompt_lookup_num_tokens`

Greedy tokens are the same either way. Sampled ones follow `torch.manual_seed` either way; in the loop they are sampled
by `transformers`, on the engine they are those of plain decoding with a seed from PyTorch's generator.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from paceline.config import DEFAULT_K
from paceline.core.errors import ConfigurationError, ContextError
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.options import MAX_WIDTH
from paceline.draft.ngram import NgramDrafter
from paceline.draft.retokenizing import TokenizerPair
from paceline.generator import SpeculativeGenerator
from paceline.huggingface import engine_call
from paceline.huggingface.cache import SlotCache
from paceline.outputs import Statistics

log = logging.getLogger("paceline")

CACHE_FIELD = "cache" if "cache" in {one.name for one in fields(CausalLMOutputWithPast)} else "past_key_values"
"""Argument name of the cache in this version of `transformers`."""


_Model: Any = PreTrainedModel  # their annotations differ between the supported versions of transformers
_Generation: Any = GenerationMixin


@runtime_checkable
class Application(Protocol):
    """An owner of a decoder, such as `DecoderApplication`."""

    def served(self) -> CompiledDecoder | SpeculativeGenerator: ...


class HuggingFaceGenerationAdapter(_Model, _Generation):  # type: ignore[misc]
    """A causal language model of `transformers` whose logits are a decoder's.

    A batch (prompts x beams or returned sequences) needs a slot for each row: ``batch_size`` of the decoder. Prompts
    are padded on the left and masked, or of one length.

    model  a decoder, or a `SpeculativeGenerator`, which drafts for greedy and sampled calls; or an application of one

    Raises:
        ConfigurationError: ``model`` is none of these.
    """

    config_class = PretrainedConfig
    main_input_name = "input_ids"
    _is_stateful = False
    _supports_sdpa = True
    _supports_flash_attn = False

    def __init__(self, model: CompiledDecoder | SpeculativeGenerator | Application) -> None:
        model = model.served() if isinstance(model, Application) else model
        generator = model if isinstance(model, SpeculativeGenerator) else None
        decoder = model if generator is None else generator.target
        if not isinstance(decoder, CompiledDecoder):
            raise ConfigurationError(
                f"model: expected a decoder or generator of this package, got {type(model).__name__}; load one with "
                "AutoDecoder.from_pretrained"
            )
        super().__init__(_model_config(decoder))
        self.decoder, self.generator = decoder, generator
        self.generation_config = _generation_config(decoder, self.config)
        self._assisted: dict[tuple[object, ...], SpeculativeGenerator] = {}
        self._last = generator

    @property
    def device(self) -> torch.device:
        """Device of the logits: the host, whatever device the decoder runs on."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def statistics(self) -> Statistics | None:
        """Statistics of the last call that ran on Paceline's engine; None if none did."""
        return None if self._last is None else self._last.statistics

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: SlotCache | None = None,
        past_key_values: SlotCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[object, ...]:
        """Return the logits after tokens. input_ids [R, T]; attention_mask [R, T] or, with a cache, [R, columns + T].

        cache, past_key_values  result of an earlier call, under the name of this or of an older `transformers`; without
                                one new sequences begin, and the slots' contents are dropped
        logits_to_keep          number of last columns; 0: all

        -> logits [R, T or ``logits_to_keep``, V] float32 (0 for padding) and the cache.

        Raises:
            ConfigurationError: an input that a decoder does not support.
            PromptError, ContextError, DecoderBusyError: as `SlotCache.read`.
        """
        if input_ids is None or input_ids.dim() != 2 or not input_ids.shape[1]:
            raise ConfigurationError(
                "input_ids: expected [rows, tokens] with at least one token, got none (inputs_embeds is not "
                "supported); give input_ids"
            )
        text = cache if cache is not None else past_key_values
        text = SlotCache(self.decoder) if text is None else self._own(text)
        columns = input_ids.shape[1]
        real = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            if attention_mask.dim() != 2 or attention_mask.shape[1] not in (columns, columns + text.get_seq_length()):
                raise ConfigurationError(
                    f"attention_mask: expected [rows, tokens] with 0 at padding, for {columns} tokens after "
                    f"{text.get_seq_length()}, got shape {list(attention_mask.shape)}; correct it"
                )
            real = attention_mask[:, -columns:] != 0
        keep = min(logits_to_keep, columns) or columns
        logits = text.read(input_ids, real, keep)
        cache_field = {} if use_cache is False else {CACHE_FIELD: text}
        output: Any = CausalLMOutputWithPast
        model_output = output(logits=logits, **cache_field)
        result: CausalLMOutputWithPast | tuple[object, ...] = (
            model_output.to_tuple() if return_dict is False else model_output
        )
        return result

    def reset_generation(self) -> None:
        """Do nothing: calls keep no state."""

    def generate(
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **keywords: Any
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate sequences, as `GenerationMixin.generate` does.

        Raises:
            ConfigurationError: an option that changes how a decoder would have to run, such as ``custom_generate``.
            ContextError: the sequences could become longer than the decoder's positions.
            PromptError, SamplingError: as `SpeculativeGenerator.sample`.
        """
        for name, reason in _REFUSED.items():
            if keywords.get(name) is not None:
                raise ConfigurationError(f"{name}: not supported by a decoder of this package ({reason}); omit it")
        check_options(keywords)
        result: Tensor | GenerateDecoderOnlyOutput = super().generate(inputs, generation_config, **keywords)
        return result

    def load_custom_generate(self, *_: object, **__: object) -> Any:
        """Raise ConfigurationError: code of a repository is never executed."""
        raise ConfigurationError(
            "custom_generate: expected greedy decoding, sampling, beam search, assistant_model or "
            "prompt_lookup_num_tokens, got code of a repository, which is not executed; use one of these"
        )

    def generate_batch(self, *_: object, **__: object) -> Any:
        """Raise ConfigurationError: continuous batching of `transformers` has its own cache."""
        raise ConfigurationError(
            "generate_batch: expected no paged cache of transformers, got one; pass more prompts than slots to "
            "`sample` or `stream` of a SpeculativeGenerator, which batches continuously"
        )

    # ---- hooks that transformers' `generate` calls

    def _validate_generation_mode(
        self, generation_mode: object, generation_config: GenerationConfig, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        """Run the checks of `transformers` without those of an assistant's configuration: a decoder is none of its
        models.
        """
        own_arguments = {k: v for k, v in generation_mode_kwargs.items() if not k.startswith("assistant")}
        super()._validate_generation_mode(generation_mode, generation_config, own_arguments)

    @wraps(GenerationMixin.prepare_inputs_for_generation)  # its signature says what `generate` takes
    def prepare_inputs_for_generation(self, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        """Return a step's inputs without those that `transformers` 4.57 adds: positions, empty embeddings."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*arguments, **keywords)
        for name in ("cache_position", "position_ids"):
            inputs.pop(name, None)
        if inputs.get("inputs_embeds") is None:
            inputs.pop("inputs_embeds", None)
        return inputs

    def _get_initial_cache_position(self, seq_length: int, device: torch.device, model_kwargs: dict[str, Any]) -> Any:
        """Accept only the new tokens with a cache in `transformers` 4.57, which takes them for a part of all tokens;
        later versions do not call this.
        """
        cache, mask = model_kwargs.get("past_key_values"), model_kwargs.get("attention_mask")
        if cache is not None and mask is not None and mask.shape[1] > seq_length:
            past = cache.get_seq_length()
            return {**model_kwargs, "cache_position": torch.arange(past, past + seq_length, device=device)}
        return super()._get_initial_cache_position(seq_length, device, model_kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *_: object, **__: object
    ) -> None:
        """Check the call before anything runs. The slots are the cache."""
        check_options({name: getattr(generation_config, name, None) for name in _CHECKED})
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not bool((mask[:, -1] != 0).all()):
            raise ConfigurationError(
                "attention_mask: expected padding on the left, got a row that ends with padding; set "
                "tokenizer.padding_side='left'"
            )
        padding = 0 if mask is None else int((mask == 0).sum(1).min())
        longest = generation_config.max_length - padding
        if longest > self.decoder.n_positions:
            raise ContextError(
                f"max_length: expected at most {self.decoder.n_positions} positions (prompt and new tokens), got "
                f"{longest}; lower max_new_tokens, or load the decoder with more n_positions"
            )
        given = [model_kwargs[name] for name in ("cache", "past_key_values") if model_kwargs.get(name) is not None]
        if given:  # a cache is false to Python: it has no layers
            self._own(given[0])
        elif generation_config.use_cache is not False:
            model_kwargs[CACHE_FIELD] = SlotCache(self.decoder)

    def _sample(self, input_ids: Tensor, **given: Any) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode on the engine if the adapter has a generator, else in the loop of `transformers`."""
        if self.generator is not None:
            call = engine_call.PreparedCall.of(input_ids, given)
            reason = call.why_not()
            if reason is None:
                return self._on_engine(self.generator, call)
            log.warning("generate runs without speculation: %s", reason)
        result: Tensor | GenerateDecoderOnlyOutput = super()._sample(input_ids, **given)
        return result

    def _assisted_decoding(self, input_ids: Tensor, **given: Any) -> Tensor | GenerateDecoderOnlyOutput:
        call = engine_call.PreparedCall.of(input_ids, given)
        reason = call.why_not()
        if reason is not None:
            raise ConfigurationError(
                f"assistant_model: not possible here, since {reason}; give one prompt at a time, and all of it"
            )
        pair = None
        if (draft := given.get("assistant_tokenizer")) is not None:
            if given.get("tokenizer") is None:
                raise ConfigurationError(
                    "assistant_tokenizer: expected the target's tokenizer with it, got none; give tokenizer too"
                )
            pair = TokenizerPair(target=given["tokenizer"], draft=draft)
        return self._on_engine(self._assistant(given.get("assistant_model"), call.config, pair), call)

    def _assistant(
        self, assistant: object | None, config: GenerationConfig, tokenizers: TokenizerPair | None
    ) -> SpeculativeGenerator:
        if assistant is None and config.prompt_lookup_num_tokens is None:
            raise ConfigurationError(
                "assistant_early_exit and use_mtp read parts of a transformers model, which a decoder does not "
                "have; give assistant_model (a decoder) or prompt_lookup_num_tokens"
            )
        draft = assistant.decoder if isinstance(assistant, HuggingFaceGenerationAdapter) else assistant
        if isinstance(draft, torch.nn.Module):
            raise ConfigurationError(
                f"assistant_model: expected a decoder, got a {type(draft).__name__}; load the folder with "
                "AutoDecoder.from_pretrained"
            )
        tokens, schedule, threshold = (
            self._of_assistant(name, config, assistant)
            for name in ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
        )
        tokens = config.prompt_lookup_num_tokens if assistant is None else tokens
        size = config.max_matching_ngram_size
        lengths = "auto" if "heuristic" in (schedule or "") else tokens
        key = (id(draft), tokens, lengths, size, threshold, tokenizers)
        if key not in self._assisted:
            if not isinstance(tokens, int) or not 1 <= tokens < MAX_WIDTH:
                raise ConfigurationError(
                    f"num_assistant_tokens: expected 1 to {MAX_WIDTH - 1} draft tokens per round, got {tokens!r}; "
                    "correct it"
                )
            if assistant is None:
                generator = SpeculativeGenerator(
                    NgramDrafter(tokens, prompt_lookup_max=size or 2), self.decoder, k=tokens
                )
            else:
                options: dict[str, Any] = {} if tokenizers is None else {"vocabulary": tokenizers}
                if threshold:
                    options["confidence_threshold"] = threshold
                generator = SpeculativeGenerator(draft, self.decoder, k=lengths, **options)
            self._assisted[key] = generator
        return self._assisted[key]

    def _of_assistant(self, name: str, config: GenerationConfig, assistant: object | None) -> Any:
        """A drafting option: the call's, else that of the assistant's configuration, as in `transformers`."""
        asked = getattr(config, name)
        if isinstance(assistant, HuggingFaceGenerationAdapter) and asked == getattr(self.generation_config, name):
            return getattr(assistant.generation_config, name)
        return asked

    def _on_engine(
        self, generator: SpeculativeGenerator, call: engine_call.PreparedCall
    ) -> Tensor | GenerateDecoderOnlyOutput:
        self._last = generator
        result = engine_call.run(generator, call)
        one_slot = len(call.input_ids) == 1 and not generator.config.prefix_caching  # then the sequence is in slot 0
        if not isinstance(result, Tensor) and one_slot and call.config.use_cache is not False:
            new = result.sequences.shape[1] - call.real.shape[1]  # the last of them is not in the cache yet
            real = torch.nn.functional.pad(call.real, (0, new - 1), value=True)
            result[CACHE_FIELD] = SlotCache.after(self.decoder, real)
        return result

    def _own(self, cache: object) -> SlotCache:
        if not isinstance(cache, SlotCache) or cache.decoder is not self.decoder:
            raise ConfigurationError(
                f"past_key_values: expected a cache that this model returned, got a {type(cache).__name__}; omit it"
            )
        return cache


_REFUSED: dict[str, str] = {
    "custom_generate": "it would run another decoding loop; write a drafter, or a logits processor",
    "inputs_embeds": "the compiled graphs read token ids",
    "position_ids": "positions follow from attention_mask",
    "negative_prompt_ids": "it needs a second text in the cache for every row",
    "negative_prompt_attention_mask": "it needs a second text in the cache for every row",
    "synced_gpus": "ranks are driven by one process, with tp_degree",
}
"""Arguments of `generate` that are rejected, and why."""

_CHECKED = ("guidance_scale", "cache_implementation", "output_attentions", "output_hidden_states", "token_healing")


def check_options(options: Mapping[str, Any]) -> None:
    if options.get("guidance_scale") not in (None, 1, 1.0):
        raise ConfigurationError(
            "guidance_scale: expected none, since it needs a second sequence in the cache for each row, got one; "
            "omit it"
        )
    if options.get("cache_implementation") not in (None, "dynamic", "dynamic_full"):
        raise ConfigurationError(
            "cache_implementation: expected none, since the decoder has its own cache, got "
            f"{options['cache_implementation']!r}; set n_positions and amp when it is loaded"
        )
    if (groups := options.get("num_beam_groups") or 1) > 1:
        raise ConfigurationError(
            f"num_beam_groups: expected 1, since groups are code of a repository, which is not executed, got {groups}; "
            "omit it"
        )
    for name in ("output_attentions", "output_hidden_states", "token_healing"):
        if options.get(name):
            raise ConfigurationError(f"{name}: not available, since a decoder's graphs return only logits; omit it")


def _model_config(decoder: CompiledDecoder) -> PretrainedConfig:
    folder = decoder.folder
    if folder is not None and folder.is_dir() and (folder / "config.json").is_file():
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return config
    model = decoder.config
    eos = list(model.eos_token_ids)
    config = PretrainedConfig()
    config.eos_token_id, config.pad_token_id = eos or None, model.pad_token_id
    config.vocab_size, config.max_position_embeddings = model.vocab_size, model.max_position_embeddings
    return config


def _generation_config(decoder: CompiledDecoder, config: PretrainedConfig) -> GenerationConfig:
    folder = decoder.folder
    if folder is not None and (folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    else:
        generation = GenerationConfig.from_model_config(config)
    generation.num_assistant_tokens = generation.num_assistant_tokens or DEFAULT_K
    generation.assistant_confidence_threshold = 0.0
    generation.num_assistant_tokens_schedule = "constant"
    return generation
