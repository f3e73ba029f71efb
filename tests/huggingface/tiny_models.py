"""Adapters over tiny random networks, which tests of transformers can make as they make its models; no tests."""

from __future__ import annotations

import copy
import string
import zlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from paceline import HuggingFaceGenerationAdapter, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from tests.fakes_models import load, saved

SLOTS, POSITIONS = 8, 192
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def config_for(vocab_size: int, **ids: int | None) -> LlamaConfig:
    """Weights large enough for distributions that are far from uniform."""
    return LlamaConfig(
        vocab_size=vocab_size, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=POSITIONS, initializer_range=0.3, **ids,
    )  # fmt: skip


def decoder_of(network: LlamaForCausalLM, folder: Path) -> SamplingDecoder:
    return load(saved(network, folder), slots=SLOTS, positions=POSITIONS)


class TinyDecoder(HuggingFaceGenerationAdapter):
    """``TinyDecoder(config)`` is a decoder with random weights, as ``LlamaForCausalLM(config)`` is a network with them.

    Attentions and hidden states, which an adapter refuses and many tests ask for by the way, are not asked for here.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        with TemporaryDirectory() as folder:
            super().__init__(self.make(LlamaForCausalLM(config).eval(), Path(folder)))

    def make(self, network: LlamaForCausalLM, folder: Path) -> SamplingDecoder | SpeculativeGenerator:
        return decoder_of(network, folder)

    def generate(
        self, inputs: torch.Tensor | None = None, generation_config: GenerationConfig | None = None, **asked: Any
    ) -> Any:
        for name in ("output_attentions", "output_hidden_states"):
            asked.pop(name, None)
        if asked.get("assistant_model") is self:
            asked["assistant_model"] = self.twin()
        return super().generate(inputs, generation_config, **asked)

    def twin(self) -> HuggingFaceGenerationAdapter:
        """The same model once more: a model that drafts for itself needs separate slots."""
        twin = HuggingFaceGenerationAdapter(self.decoder.sibling())
        twin.generation_config = copy.deepcopy(self.generation_config)
        return twin


class TinyGenerator(TinyDecoder):
    """The same with a draft model that is right often and wrong often."""

    def make(self, network: LlamaForCausalLM, folder: Path) -> SpeculativeGenerator:
        target = decoder_of(network, folder / "target")
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += 0.03 * torch.randn(parameter.shape)
        return SpeculativeGenerator(decoder_of(network, folder / "draft"), target, k=3)


def tokenizer_for(text: Path) -> PreTrainedTokenizerFast:
    """A thousand tokens: what is frequent in a text, in ASCII, so that every id stands for whole characters."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=list(SPECIAL.values()), show_progress=False)
    words.train_from_iterator([string.printable.strip(), text.read_bytes().decode("ascii", "ignore")], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **SPECIAL)


class StandIn:
    """In place of a class whose ``from_pretrained`` would download: a name gets the same every time."""

    def __init__(self, make: Callable[[str], object]) -> None:
        self._make = make

    def from_pretrained(self, name: str, **_options: object) -> object:
        return self._make(name)


def stand_ins(model: type[TinyDecoder], text: Path) -> dict[str, StandIn]:
    """Models and tokenizers that tests take from the hub, by class name; the tokenizer knows the words of a text."""

    def make(name: str) -> TinyDecoder:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(name.encode()))
            return model(config_for(len(words), bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id))

    words = tokenizer_for(text)
    return {"AutoModelForCausalLM": StandIn(make), "AutoTokenizer": StandIn(lambda _name: copy.deepcopy(words))}
