"""A tokenizer of single characters, few enough for a table model and enough for JSON; no tests."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_CHARACTERS = string.ascii_lowercase[:26] + '{}[]":,<>/_ 0123'


def letters(template: str) -> PreTrainedTokenizerFast:
    """Byte-level, one id for each of some ASCII characters; id 0 ends a text."""
    mapped = {" ": "\u0120"}
    names = ["<e>", *(mapped.get(one, one) for one in _CHARACTERS)]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<e>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<e>")
    tokenizer.chat_template = template
    return tokenizer
