"""One choice of an answer: from the tokens of its rounds to text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.outputs import RequestOutput
from paceline.serving.parsers.base import Delta, Parser
from paceline.serving.render.pieces import Origin, Step, TokenPiece
from paceline.text.stop_strings import StopStringFilter


class ChoiceRenderer:
    """Turns rounds into steps. Token by token, so that the steps add up to the same wherever rounds begin and end.

    skip     tokens that were sent before, by another server: they are rendered, and their steps are not marked
    by_token  a step for every token
    ended    whether its last step was handed out; tokens that come later are not part of the answer
    """

    def __init__(
        self, index: int, text: StopStringFilter, parser: Parser, *, skip: int = 0, by_token: bool = False
    ) -> None:
        self._index, self._text, self._parser = index, text, parser
        self._skip, self._by_token = skip, by_token
        self.tokens = 0
        self.called = self.ended = False

    def push(self, output: RequestOutput) -> Iterator[tuple[Step, bool]]:
        """The steps of a round, and whether each is new to the client.

        Raises:
            RequestError: the round ended the request with it.
        """
        if self.ended:
            return
        if output.error is not None:
            raise output.error
        pieces: list[TokenPiece] = []
        delta, first = Delta(), not self.tokens
        for place, token in enumerate(output.tokens):
            text = self._text.push(token)
            delta += self._parser.push(text) if text else Delta()
            pieces.append(_piece(output, place, text))
            self.tokens += 1
            if self._parser.ended:
                self.ended = True
                yield self._step(delta, pieces, first=first, reason="stop"), self.tokens > self._skip
                return
            last = place == len(output.tokens) - 1
            if not last and (self._by_token or self.tokens == self._skip):
                yield self._step(delta, pieces, first=first), self.tokens > self._skip
                pieces, delta, first = [], Delta(), False
        reason = output.finish_reason
        if reason is not None:
            self.ended = True
            rest = self._text.flush()
            delta += (self._parser.push(rest) if rest else Delta()) + self._parser.flush()
            if rest and pieces:
                last_piece = pieces[-1]
                pieces[-1] = TokenPiece(
                    last_piece.token, last_piece.text + rest, last_piece.origin, last_piece.logprob, last_piece.top
                )
        step = self._step(delta, pieces, first=first, reason=reason)
        # Who was sent the last token was sent the reason with it.
        yield step, self.tokens > self._skip or not output.tokens

    def _step(self, delta: Delta, pieces: Sequence[TokenPiece], *, first: bool, reason: str | None = None) -> Step:
        self.called = self.called or bool(delta.tool_calls)
        finish = None if reason is None else "length" if reason == "length" else "stop"
        if finish == "stop" and self.called:
            finish = "tool_calls"
        return Step(self._index, delta, tuple(pieces), first, finish)


def _piece(output: RequestOutput, place: int, text: str) -> TokenPiece:
    origin: Origin = "target"
    if place < output.accepted:
        origin = "draft"
    elif output.accepted < output.drafted and place == output.accepted:
        origin = "corrected"
    if output.token_logprobs is None:
        return TokenPiece(output.tokens[place], text, origin)
    logprobs = output.token_logprobs[place]
    return TokenPiece(output.tokens[place], text, origin, logprobs.logprob, logprobs.top)
