"""The requests that generate, as one type."""

from __future__ import annotations

from paceline.serving.openai.chat import ChatRequest
from paceline.serving.openai.completion import CompletionRequest
from paceline.serving.openai.responses import ResponsesRequest

GenerationRequest = CompletionRequest | ChatRequest | ResponsesRequest
