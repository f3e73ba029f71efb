"""The chat model with HTTP, called by OpenAI's own client: its template, and a head that drafts in its process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from paceline.placement import INSTANCES
from paceline.placement.planning.groups import plan_groups
from paceline.placement.planning.model_specs import models_of
from tests.serving.served import served

pytestmark = pytest.mark.ray
HEAD = Path(__file__).resolve().parents[2] / "examples" / "smollm2" / "eagle3"


@pytest.fixture(scope="module")
def client(cluster: object, smollm2: Path) -> Iterator[openai.OpenAI]:
    shape = {"n_positions": 128, "amp": "f32", "backend": "eager", "batch_size": 1}
    entry = {"name": "smollm2", "path": str(smollm2), "draft": {"path": str(HEAD), "k": 3}, **shape}
    with served(plan_groups(models_of([entry], folder=Path(), where="test"), INSTANCES["inf2.48xlarge"])) as connected:
        yield connected


def test_a_chat_uses_the_models_template(client: openai.OpenAI) -> None:
    asked = {"model": "smollm2", "max_tokens": 24, "temperature": 0}
    question = {"role": "user", "content": "What is the capital of France?"}
    answer = client.chat.completions.create(messages=[question], **asked)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == 37  # the template's own system message is a part of them
    talk = [question, {"role": "assistant", "content": answer.choices[0].message.content}]
    talk.append({"role": "user", "content": "And of Italy?"})
    chunks = list(client.chat.completions.create(messages=talk, stream=True, **asked))  # type: ignore[call-overload]
    assert "Rome" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
