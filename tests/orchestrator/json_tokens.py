"""A tokenizer of some forty tokens that can write JSON, for models that are tables."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

CHARACTERS = [*'{}[]":,.-', *"0123456789", *"abcdefnlorstuy"]
MERGES = [tuple(one.split()) for one in ("t r", "tr u", "tru e", '" :', "a b", "ab c", "n u", '" ,', '{ "')]
WORDS = [*CHARACTERS, *("".join(pair) for pair in MERGES), "<bos>", "<eos>", "<end>"]
VOCABULARY = {word: index for index, word in enumerate(WORDS)}
BOS, EOS, END = (VOCABULARY[word] for word in WORDS[-3:])
SIZE = len(WORDS)


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, so that every token is its own characters."""
    made = Tokenizer(BPE(vocab=VOCABULARY, merges=MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", eos_token="<eos>")
