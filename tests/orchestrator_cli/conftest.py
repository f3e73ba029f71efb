"""A checkpoint that the command line can work with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

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
