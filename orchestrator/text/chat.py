"""Conversations as prompts, by the chat template of a model's tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.detokenizer import Tokenizer
from paceline.core.errors import PromptError

ChatMessage = Mapping[str, str]
_WORD = "paceline-probe-"


def roles_in_parts(tokenizer: Tokenizer) -> frozenset[str]:
    """Return the roles whose content the chat template reads only as a list of parts: it would drop a plain string.

    They are found by rendering short conversations both ways, since a template is a program.
    """
    found: set[str] = set()
    for roles in (("user",), ("system", "user", "assistant", "user")):
        messages = [{"role": role, "content": f"{_WORD}{place}"} for place, role in enumerate(roles)]
        as_texts, as_parts = (_rendered(tokenizer, for_template(messages, parts)) for parts in ((), roles))
        words = [str(message["content"]) for message in messages]
        found |= {role for role, word in zip(roles, words, strict=True) if word not in as_texts and word in as_parts}
    return frozenset(found | {"tool"} if "user" in found else found)


def for_template(messages: Sequence[Mapping[str, Any]], in_parts: Collection[str]) -> list[dict[str, Any]]:
    """Return messages with contents as strings in the template's form. ``in_parts``: see `roles_in_parts`."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message["role"] in in_parts
        else dict(message)
        for message in messages
    ]


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> str:
    chat_tokenizer: Any = tokenizer
    try:
        return str(chat_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception:  # templates are programs that may raise any exception
        return ""


def chat_ids(tokenizer: Tokenizer, messages: Sequence[ChatMessage], *, complete: bool = False) -> list[int]:
    """Return the ids of a conversation, with the beginning of the assistant's next turn unless it is ``complete``.
    Messages are {"role", "content"}.

    Raises:
        PromptError: the model has no chat template, or its template rejects the messages.
    """
    chat_tokenizer: Any = tokenizer
    if not getattr(chat_tokenizer, "chat_template", None):
        raise PromptError("messages: expected a model with a chat template, got one without; use it to continue a text")
    try:
        read = for_template(messages, roles_in_parts(tokenizer))
        text = chat_tokenizer.apply_chat_template(read, tokenize=False, add_generation_prompt=not complete)
    except Exception as error:  # templates are programs that may raise any exception
        raise PromptError(
            f"messages: the chat template rejects them ({error}); correct the roles or their order"
        ) from error
    return list(chat_tokenizer.encode(text, add_special_tokens=False))


def chat_answers(tokenizer: Tokenizer, messages: Sequence[ChatMessage]) -> tuple[list[int], list[bool]]:
    """Return the ids of a conversation that an assistant's turn ends, and which of them are of its answers, the token
    that ends one included.

    Raises:
        PromptError: as `chat_ids`; or there is no answer; or the template writes earlier turns anew.
    """
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise PromptError("messages: expected at least one of the assistant's to learn from, got none; remove the row")
    ids = chat_ids(tokenizer, messages[: answers[-1] + 1], complete=True)
    marked, end = [False] * len(ids), getattr(tokenizer, "eos_token_id", None)
    for index in answers:
        before, after = chat_ids(tokenizer, messages[:index]), chat_ids(tokenizer, messages[: index + 1], complete=True)
        if ids[: len(before)] != before or ids[: len(after)] != after:
            raise PromptError(
                "messages: expected a chat template that only adds to a conversation, got one that writes earlier "
                f"turns anew after message {index}; give conversations of one turn"
            )
        while end in after[len(before) :] and after[-1] != end:  # line ends after the last token
            after.pop()
        marked[len(before) : len(after)] = [True] * (len(after) - len(before))
    return ids, marked


@dataclass(slots=True)
class ChatSession:
    """Messages so far, within the model's context length.

    room    maximum ids of a prompt: the model's context, less the maximum of a response
    system  the first message; None: the template's default
    """

    tokenizer: Tokenizer
    room: int
    system: str | None = None
    turns: list[ChatMessage] = field(default_factory=list)

    def ask(self, text: str) -> tuple[list[int], int]:
        """Add a question. -> its prompt's ids, and how many messages at the beginning were dropped to fit the context

        Raises:
            PromptError: it is too long by itself, or the template rejects it. Then it is not added.
        """
        turns: list[ChatMessage] = [*self.turns, {"role": "user", "content": text}]
        for forgotten in range(0, len(turns), 2):  # a question and its answer at a time
            ids = chat_ids(self.tokenizer, [*self._first(), *turns[forgotten:]])
            if len(ids) <= self.room:
                self.turns = turns[forgotten:]
                return ids, forgotten
        raise PromptError(
            f"messages: expected at most {self.room} tokens, got {len(ids)} for the question with its template; "
            "shorten it, lower --max-new-tokens or raise --n-positions"
        )

    def answer(self, text: str) -> None:
        """Add what the model said, whole or not."""
        self.turns.append({"role": "assistant", "content": text})

    def clear(self) -> None:
        self.turns.clear()

    def _first(self) -> list[ChatMessage]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]
