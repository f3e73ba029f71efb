"""Whether draft and target speak the same ids. Sizes may differ by padding; meanings may not."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.core.errors import ConfigurationError, PairingError
from paceline.decoder.decoder import CompiledDecoder
from paceline.draft.vocabulary import Intersection, Vocabulary

LEAST_SHARED = 0.05
"""Of the target's tokens. With fewer in common nearly nothing a draft could say would stand."""


def vocabulary(draft: CompiledDecoder, target: CompiledDecoder, kind: str = "same") -> Vocabulary:
    """What stands between the ids of the two.

    kind  "same": the tokenizers must be equal; "intersection": only tokens that both have are drafted

    Raises:
        PairingError: the two cannot work together like this.
        ConfigurationError: no such kind.
    """
    if kind not in ("same", "intersection"):
        raise ConfigurationError(f"vocabulary={kind!r} is unknown; use 'same' or 'intersection'")
    if draft.batch_size != target.batch_size:
        raise PairingError(
            f"the draft has batch_size={draft.batch_size} and the target {target.batch_size}; load both with the same"
        )
    sizes = (target.config.vocab_size, draft.config.vocab_size)
    if kind == "same":
        _check(draft, target)
        return Vocabulary(*sizes)
    theirs, ours = (None if d.folder is None else _vocabulary(d.folder) for d in (target, draft))
    if theirs is None or ours is None:
        raise PairingError("vocabulary='intersection' compares tokens, and a tokenizer.json is missing; put it there")
    made = Intersection(theirs, ours, sizes=sizes)
    if made.shared < LEAST_SHARED * sizes[0]:
        raise PairingError(
            f"only {made.shared} of the target's {sizes[0]} tokens stand in the draft's vocabulary, so nearly no draft "
            "could be accepted; take a draft whose tokenizer is more like the target's"
        )
    return made


def _check(draft: CompiledDecoder, target: CompiledDecoder) -> None:
    ours, theirs = (None if d.folder is None else _vocabulary(d.folder) for d in (draft, target))
    sizes = (draft.config.vocab_size, target.config.vocab_size)
    if ours is None or theirs is None:
        if sizes[0] != sizes[1]:
            raise PairingError(
                f"draft and target have vocabularies of {sizes[0]} and {sizes[1]} ids, and a tokenizer.json is missing "
                "to see whether the ids mean the same; put the tokenizer into both folders, or take a draft of the "
                "target's family"
            )
        return
    limit = min(sizes)
    if ours != theirs:
        both = {token for token, number in ours.items() if number < limit}
        both |= {token for token, number in theirs.items() if number < limit}
        differ = sorted(token for token in both if ours.get(token) != theirs.get(token))
        if differ:
            raise PairingError(
                f"draft and target have unequal tokenizers: {len(differ)} tokens have other ids, such as {differ[0]!r} "
                f"({ours.get(differ[0])} and {theirs.get(differ[0])}); take a draft trained with the target's "
                "tokenizer, or set vocabulary='intersection'"
            )


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Token -> id of a tokenizer.json, added tokens included."""
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
        raise PairingError(f"{path} cannot be read as a tokenizer ({error}); restore the file") from error
