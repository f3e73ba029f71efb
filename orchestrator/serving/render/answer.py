"""A whole answer: every choice of it, its events or its body, and what is counted on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.outputs import RequestOutput
from paceline.serving.render.acceptance import Acceptance
from paceline.serving.render.choice import ChoiceRenderer
from paceline.serving.render.pieces import AnswerWriter, ChoiceText, Usage, encode
from paceline.serving.settings import SpecMetrics


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What is fixed about an answer before its first token.

    prompt_tokens  of all prompts together
    candidates     texts that are generated for each prompt
    shown          how many of them, the most probable, are shown
    stream         whether it is written as events
    spec_metrics   what it says about acceptance; only where it has one choice
    """

    prompt_tokens: int
    candidates: int
    shown: int
    stream: bool
    spec_metrics: SpecMetrics


class Answer:
    """Takes in what the engine hands out and writes it down."""

    def __init__(
        self,
        plan: AnswerPlan,
        writer: AnswerWriter,
        choices: Sequence[ChoiceRenderer],
        *,
        acceptance: Acceptance,
    ) -> None:
        self._plan, self._writer, self._choices, self._acceptance = plan, writer, choices, acceptance
        self._texts = [ChoiceText() for _ in choices]
        self._sent = [0] * len(choices)
        self._cached: int | None = None

    @property
    def sent(self) -> tuple[int, ...]:
        """Tokens of each choice so far."""
        return tuple(self._sent)

    @property
    def ended(self) -> tuple[bool, ...]:
        """Whether each choice is complete, though the engine may not know of it."""
        return tuple(choice.ended for choice in self._choices)

    def push(self, outputs: Iterable[RequestOutput]) -> bytes:
        """What the rounds of one or several requests add; empty where nothing is streamed."""
        events = []
        for output in outputs:
            if self._choices[output.index].ended:
                continue
            self._acceptance.count(output.drafted, output.accepted)
            if output.cached_tokens is not None and output.index % self._plan.candidates == 0:
                self._cached = (self._cached or 0) + output.cached_tokens  # other candidates find the prompt anyhow
            for step, is_new in self._choices[output.index].push(output):
                self._sent[step.choice] += len(step.pieces)
                if not self._plan.stream:
                    self._texts[step.choice].add(step)
                    continue
                written = self._writer.step(step, self._usage)
                if is_new:
                    events.append(written)
        return b"".join(events)

    def end(self) -> bytes:
        """The last events, or the body."""
        level = self._plan.spec_metrics if len(self._choices) == 1 else "none"
        metrics = self._acceptance.report(level)
        if self._plan.stream:
            return self._writer.end(self._usage, metrics)
        return encode(self._writer.body(self._best(), self._usage, metrics))

    def _best(self) -> list[ChoiceText]:
        """The choices that are shown, prompt by prompt."""
        candidates, shown = self._plan.candidates, self._plan.shown
        if shown == candidates:
            return self._texts
        best = []
        for first in range(0, len(self._texts), candidates):
            group = self._texts[first : first + candidates]
            best += sorted(group, key=lambda choice: -choice.mean_logprob)[:shown]
        return best

    @property
    def _usage(self) -> Usage:
        return Usage(self._plan.prompt_tokens, sum(self._sent), self._cached)
