"""Check whether draft and target have the same ids, and build the map between them if they differ.

Sizes may differ by padding; meanings may not, unless a map translates them.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.detokenizer import Tokenizer, plain_text
from paceline.core.errors import CheckpointError, PairingError
from paceline.decoder.json_fields import read_json_object
from paceline.decoder.weights.folder import is_gguf
from paceline.decoder.weights.hub import checkpoint_path
from paceline.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from paceline.decoder.decoder import CompiledDecoder
    from paceline.draft.retokenizing import TokenizerPair
    from paceline.draft.vocab_map import VocabMap
    from paceline.loadable import Loadable

LEAST_SHARED = 0.05
"""Minimum share of the target's tokens in common. With fewer, nearly no draft would be accepted."""


def check(draft: Loadable | CompiledDecoder, target: Loadable | CompiledDecoder, kind: object = "same") -> None:
    """Raise PairingError where configurations and tokenizers say that the two cannot work together."""
    batches = draft.options.batch_size, target.options.batch_size
    if batches[0] != batches[1]:
        raise PairingError(
            f"batch_size: expected {batches[1]} for the draft, as for the target, got {batches[0]}; load both with "
            "the same"
        )
    if kind == "same":
        check_same_tokenizer((draft.folder, target.folder), (draft.config.vocab_size, target.config.vocab_size))


def between(
    draft: CompiledDecoder, target: CompiledDecoder, kind: str | TokenizerPair = "same"
) -> VocabMap | TokenizerPair:
    """Return the map between the ids of draft and target.

    kind  "same": the tokenizers must be equal; "intersection": only common tokens are drafted; "retokenize": they
          exchange text, with the tokenizers in their folders, or those of a `TokenizerPair`

    Raises:
        PairingError: the two do not fit together in this way.
    """
    from paceline.draft.retokenizing import TokenizerPair
    from paceline.draft.vocab_map import IntersectionVocabMap, VocabMap

    check(draft, target, kind)
    sizes = (target.config.vocab_size, draft.config.vocab_size)
    if isinstance(kind, TokenizerPair):
        return _usable(kind)
    if kind == "retokenize":
        return _usable(TokenizerPair(target=_tokenizer(target, "target"), draft=_tokenizer(draft, "draft")))
    if kind == "same":
        return VocabMap(*sizes)
    theirs, ours = (None if d.folder is None else _vocabulary(d.folder) for d in (target, draft))
    if theirs is None or ours is None:
        raise PairingError(
            "vocabulary: expected a tokenizer.json of both models for 'intersection', got none for one; add it to "
            "the folder"
        )
    vocab_map = IntersectionVocabMap(theirs, ours, sizes=sizes)
    if vocab_map.shared < LEAST_SHARED * sizes[0]:
        raise PairingError(
            f"draft: expected a vocabulary like the target's, got one with {vocab_map.shared} of its {sizes[0]} "
            "tokens, so almost no draft token could be accepted; use vocabulary='retokenize', or a draft with a "
            "more similar tokenizer"
        )
    return vocab_map


def _tokenizer(decoder: CompiledDecoder, side: str) -> Tokenizer:
    if decoder.folder is not None:
        try:
            return load_tokenizer(decoder.folder)
        except CheckpointError as error:
            raise PairingError(
                f"vocabulary: expected the {side}'s tokenizer for 'retokenize', got none ({error}); add it to the "
                "folder"
            ) from error
    raise PairingError(
        f"vocabulary: expected the {side}'s tokenizer for 'retokenize', got none, since it was loaded without a "
        "folder; give vocabulary=TokenizerPair(target=..., draft=...)"
    )


def _usable(pair: TokenizerPair) -> TokenizerPair:
    """Raise PairingError unless both tokenizers turn text into ids and ids into text."""
    for side, tokenizer in (("target", pair.target), ("draft", pair.draft)):
        try:
            ids = tokenizer.encode("a", add_special_tokens=False)
            text = plain_text(tokenizer, list(ids))
        except (AttributeError, TypeError) as error:
            raise PairingError(
                f"vocabulary: expected a tokenizer like those of transformers, got {type(tokenizer).__name__} as "
                f"the {side}'s ({error}); wrap it, for instance with PreTrainedTokenizerFast(tokenizer_object=...)"
            ) from error
        if not isinstance(text, str) or not all(isinstance(one, int) for one in ids):
            raise PairingError(
                f"vocabulary: expected a list of ids from the {side}'s tokenizer, got another value; use a "
                "tokenizer of transformers"
            )
    return pair


def check_same_tokenizer(folders: tuple[Path | None, Path | None], sizes: tuple[int, int]) -> None:
    """Raise PairingError unless draft and target, in this order, give their ids the same meaning.

    folders  of their checkpoints; None where there is none
    sizes    of their vocabularies
    """
    ours, theirs = (None if folder is None else _vocabulary(folder) for folder in folders)
    if ours is None or theirs is None:
        if sizes[0] != sizes[1]:
            raise PairingError(
                f"draft: expected a tokenizer.json to compare the vocabularies of {sizes[0]} and {sizes[1]} ids, "
                "got none; put the tokenizer into both folders, or use a draft of the target's family"
            )
        return
    limit = min(sizes)
    if ours != theirs:
        both = {token for token, number in ours.items() if number < limit}
        both |= {token for token, number in theirs.items() if number < limit}
        pads = _renamed_pads(folders, (ours, theirs))
        differ = sorted(token for token in both - pads if ours.get(token) != theirs.get(token))
        if differ:
            raise PairingError(
                f"draft: expected the target's tokenizer, got one with {len(differ)} other ids, such as "
                f"{differ[0]!r} ({ours.get(differ[0])} and {theirs.get(differ[0])}); use a draft trained with the "
                "target's tokenizer, or set vocabulary='intersection' or 'retokenize'"
            )


def _renamed_pads(folders: tuple[Path | None, ...], vocabularies: tuple[dict[str, int], ...]) -> set[str]:
    """Both names of the padding token, if that has one id and two names: no text holds it."""
    names = [_pad(folder) for folder in folders if folder is not None]
    ids = {vocabulary.get(name) for name, vocabulary in zip(names, vocabularies, strict=True)}
    return set(names) if len(ids) == 1 and None not in ids else set()


def _pad(folder: Path) -> str:
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        with suppress(CheckpointError):
            pad = read_json_object(checkpoint_path(folder) / file).get("pad_token")
            if pad:
                return str(pad["content"] if isinstance(pad, dict) else pad)
    return ""


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Token -> id of a tokenizer.json, added tokens included, or of a GGUF file."""
    folder = checkpoint_path(folder)
    if is_gguf(folder):
        from paceline.text.gguf_tokenizer import gguf_vocabulary

        return gguf_vocabulary(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        pairs = (
            vocabulary.items() if isinstance(vocabulary, dict) else ((row[0], i) for i, row in enumerate(vocabulary))
        )
        added = {entry["content"]: entry["id"] for entry in content.get("added_tokens", [])}
        return {**dict(pairs), **added}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise PairingError(f"{path}: the tokenizer cannot be read ({error}); restore the file") from error
