"""Checkpoints that the command line can work with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.decoder.tiny import VOCABULARY, network


@pytest.fixture(scope="session")
def target(compile_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small target with a tokenizer of one word for each id."""
    folder = tmp_path_factory.mktemp("target")
    network().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="session")
def home(compile_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the repository's root, with a tiny pair in place of the demo's."""
    home = tmp_path_factory.mktemp("home")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    tokenizer.train_from_iterator(["def main(argv=None):\n    return argv\n"] * 4, trainer)
    for name, layers in (("target", 2), ("draft", 1)):
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "max_position_embeddings": 512}
        config = LlamaConfig(vocab_size=280, num_hidden_layers=layers, bos_token_id=0, eos_token_id=None, **shape)
        folder = home / "examples" / "pycode" / name
        LlamaForCausalLM(config).save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    return home / "examples" / "pycode"
