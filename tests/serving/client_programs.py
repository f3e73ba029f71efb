"""Programs that use a server through published clients, one for each client; run by the clients' own Python.

    python client_programs.py NAME ADDRESS

Prints one JSON object. Imports nothing of this project.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def with_openai(address: str) -> dict[str, Any]:
    """OpenAI's own client: chats, completions and responses, whole and streamed."""
    import openai

    client = openai.OpenAI(base_url=address, api_key="none")
    chat: Any = {"model": "m", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 8, "seed": 1}
    parts = client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
    streamed = "".join(choice.delta.content or "" for part in parts for choice in part.choices)
    return {
        "whole": client.chat.completions.create(**chat).choices[0].message.content,
        "streamed": streamed,
        "completion": client.completions.create(model="m", prompt="abc", max_tokens=8).choices[0].text,
        "response": client.responses.create(model="m", input="abc", max_output_tokens=8).output_text,
        "models": [one.id for one in client.models.list()],
    }


def with_llama_index(address: str) -> dict[str, Any]:
    """LlamaIndex: a chat, a completion, and a stream."""
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    options: Any = {"model": "m", "api_base": address, "api_key": "none", "max_tokens": 8, "context_window": 512}
    chat, plain = OpenAILike(is_chat_model=True, **options), OpenAILike(is_chat_model=False, **options)
    return {
        "whole": chat.chat([ChatMessage(role="user", content="abc")]).message.content,
        "streamed": "".join(part.delta or "" for part in chat.stream_chat([ChatMessage(role="user", content="abc")])),
        "completion": plain.complete("abc").text,
    }


def with_langchain(address: str) -> dict[str, Any]:
    """LangChain: a chat, a completion, a stream, and an answer of a schema."""
    from langchain_openai import ChatOpenAI, OpenAI

    options: Any = {"model": "m", "base_url": address, "api_key": "none", "max_tokens": 8, "seed": 1}
    chat = ChatOpenAI(**options)
    schema = {"title": "Answer", "type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}
    more = {"max_tokens": 64, "extra_body": {"chat_template_kwargs": {"no_reasoning": True}}}
    structured = ChatOpenAI(**{**options, **more}).with_structured_output(schema, method="json_schema")
    return {
        "whole": chat.invoke("abc").content,
        "streamed": "".join(part.content for part in chat.stream("abc")),
        "completion": OpenAI(**options).invoke("abc"),
        "counted": chat.invoke("abc").usage_metadata["output_tokens"],
        "structured": structured.invoke("abc")["a"],
    }


PROGRAMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "openai": with_openai,
    "llama_index": with_llama_index,
    "langchain": with_langchain,
}

if __name__ == "__main__":
    print(json.dumps(PROGRAMS[sys.argv[1]](sys.argv[2])))
