"""The tokenizer of a folder whose files are all there is to it, without transformers: importing that takes as long as
a third of PyTorch, and its `AutoTokenizer` imports PyTorch and code of models besides.

Ids and text come from the `tokenizers` library, as they do in transformers' `PreTrainedTokenizerFast`. Whatever else
is asked, such as a chat template, is asked of that class, which is imported then. What is known here of transformers
was seen in 4.57 and 5.24.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.core.errors import CheckpointError
from paceline.decoder.json_fields import read_json_object

_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Names of the class in tokenizer_config.json. Others change what tokenizer.json says."""

_OWN_CLASS = frozenset({None, "qwen2"})
"""Values of ``model_type`` for which `AutoTokenizer` takes another class, whatever the file says."""

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_WITHOUT_EFFECT = frozenset({"tokenizer_class", "backend", "is_local", "chat_template", "model_max_length"})
"""Keys of tokenizer_config.json that change neither ids nor text."""


class QuickTokenizer:
    """See the module. ``backend_tokenizer`` is the `tokenizers.Tokenizer`."""

    def __init__(self, folder: Path, backend: Any) -> None:
        self.__dict__.update(_folder=folder, backend_tokenizer=backend)

    def encode(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        """As transformers; no length is warned of."""
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """As transformers."""
        if clean_up_tokenization_spaces:
            options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": True}
            return str(self._full.decode(token_ids, **options))
        text: str = self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    @cached_property
    def _full(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(self._folder), local_files_only=True)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked by copy, pickle and the like
            raise AttributeError(name)
        return getattr(self._full, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._full, name, value)


def quick_tokenizer(folder: Path) -> QuickTokenizer | None:
    """The tokenizer of a folder; None: transformers has to say what it is.

    Raises:
        Exception: tokenizer.json cannot be read; the library has no other.
    """
    try:
        settings, model = (read_json_object(folder / name) for name in ("tokenizer_config.json", "config.json"))
    except CheckpointError:
        return None
    unknown = settings.keys() - _WITHOUT_EFFECT - {*_TOKENS, "clean_up_tokenization_spaces"}
    if settings.get("tokenizer_class") not in _CLASSES or model.get("model_type") in _OWN_CLASS or unknown:
        return None
    file, mapped = folder / "tokenizer.json", folder / "special_tokens_map.json"
    if settings.get("clean_up_tokenization_spaces") or not file.is_file():
        return None
    if any((folder / name).exists() for name in ("added_tokens.json", "tekken.json")):
        return None
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(file))
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    named = [settings.get(name) for name in _TOKENS]
    if mapped.exists():
        named += read_json_object(mapped).values()
    if backend.truncation or backend.padding or any(token is not None and token not in special for token in named):
        return None  # transformers changes it
    return QuickTokenizer(folder, backend)
