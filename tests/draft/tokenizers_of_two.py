"""Small tokenizers that divide the same text differently, and models that know a text by heart; no tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.fakes import table

TEXT = "the cat sat on my red hat, caf\u00e9 na\u00efve \u65e5\u672c\u8a9e, we go up!"
CORPUS = [
    TEXT,
    "the cat sat on the mat and the rat ran",
    "caf\u00e9 na\u00efve \u65e5\u672c \u65e5\u672c\u8a9e",
    "return self",
]


def bytes_merged(size: int, *, corpus: Sequence[str] = CORPUS, bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE of up to ``size`` ids, with only the bytes in the corpus; characters may be split over tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(list(corpus), trainers.BpeTrainer(vocab_size=size, special_tokens=["<e>", "<b>"]))
    if bos:
        from tokenizers.processors import TemplateProcessing

        made.post_processor = TemplateProcessing(single="<b> $A", special_tokens=[("<b>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<e>", bos_token="<b>")


def every_byte() -> PreTrainedTokenizerFast:
    """Byte-level ids of any bytes: 0 is special, and after the bytes come merges, some of halves of characters."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<e>"])
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<e>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """A vocabulary as Llama 2's: 0 is special, 1 to 256 are bytes by name, 257 is a letter."""
    names = ["<e>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<e>")


def marked_words(corpus: Sequence[str] = CORPUS) -> PreTrainedTokenizerFast:
    """Unigrams with a mark in front of every word, as SentencePiece has them: a text's first space goes lost."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=["<e>", "<b>", "<u>"], unk_token="<u>")
    made.train_from_iterator(list(corpus), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<e>", bos_token="<b>", unk_token="<u>")


def by_heart(script: Sequence[int], vocab_size: int, *, seed: int, certain: float = 50.0) -> Tensor:
    """A table that continues with the script wherever the last two tokens stand in it, and is random elsewhere."""
    logits = table(vocab_size, seed=seed)
    for before, last, token in zip([0, *script], script, script[1:], strict=False):
        logits[before, last] = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))
        logits[before, last, token] = certain
    return logits
