"""Clients of a service that is disturbed: usual ones, slow ones, and ones that disconnect. They cause no faults."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from threading import Barrier, BrokenBarrierError
from urllib.request import urlopen

import openai

GIVE_UP_S = 180.0
_RUNNING = re.compile(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([\d.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Stream:
    """How one stream ended. ``error``: "", "typed" (an error object) or "broken"."""

    text: str
    error: str
    pause_s: float


@dataclass(frozen=True, slots=True)
class Whole:
    """How a service came back. ``unanswered``: how often it said that it was ready, and a request got no answer."""

    seconds: float
    unanswered: int


class Client:
    """Streams of one service, all of the model "big" at temperature 0.8, told apart by their seed."""

    def __init__(self, url: str, *, tokens: int) -> None:
        self._url, self._tokens = url, tokens
        self._openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=GIVE_UP_S)

    def stream(self, seed: int, begun: Barrier | None = None, *, chunk_s: float = 0.0, leave: int = 0) -> Stream:
        """One stream to its end.

        begun    passed when it has its first text
        chunk_s  seconds before every chunk but the first: a slow reader
        leave    chunks after which the client closes the connection; 0: never
        """
        parts, last, pause, error = list[str](), time.monotonic(), 0.0, ""
        try:
            with self._openai.completions.create(
                model="big", prompt="def f(a, b):", max_tokens=self._tokens, temperature=0.8, seed=seed, stream=True
            ) as chunks:
                for chunk in chunks:
                    now = time.monotonic()
                    pause, last = max(pause, now - last if parts else 0.0), now
                    parts += [choice.text for choice in chunk.choices]
                    if begun is not None:
                        waiting, begun = begun, None
                        with suppress(BrokenBarrierError):
                            waiting.wait(GIVE_UP_S)
                    if leave and len(parts) >= leave:
                        break
                    time.sleep(chunk_s)
        except (openai.APIConnectionError, OSError):
            error = "broken"
        except openai.APIError:
            error = "typed"
        if begun is not None:
            begun.abort()
        return Stream("".join(parts), error, pause)

    def wait_until_whole(self) -> Whole:
        """Wait until the service is ready and a new request is answered, three times in a row."""
        begin, good, unanswered = time.monotonic(), 0, 0
        while good < 3:
            if time.monotonic() - begin > GIVE_UP_S:
                return Whole(float("inf"), unanswered)
            try:
                ready = urlopen(f"{self._url}/health/ready", timeout=3).status == 200
                answered = ready and self.answers()
                good, unanswered = good + 1 if answered else 0, unanswered + (ready and not answered)
            except (OSError, HTTPException):
                good = 0
            time.sleep(0.3)
        return Whole(time.monotonic() - begin, unanswered)

    def answers(self) -> bool:
        begin = time.monotonic()
        try:
            asked = self._openai.with_options(timeout=20).completions
            asked.create(model="big", prompt="x", max_tokens=2, temperature=0)
        except openai.APIError as error:
            print(f"a request was not answered: {error!r} after {time.monotonic() - begin:.1f} s", flush=True)
            return False
        return True

    def seconds_until_idle(self) -> float:
        """Wait until no replica has a request in a slot or in its queue; return the seconds."""
        begin = time.monotonic()
        while time.monotonic() - begin < GIVE_UP_S:
            with suppress(OSError, HTTPException):
                text = urlopen(f"{self._url}/metrics", timeout=5).read().decode()
                counts = [float(count) for count in _RUNNING.findall(text)]
                if counts and not sum(counts):
                    return time.monotonic() - begin
            time.sleep(0.1)
        return float("inf")

    def loaded(self) -> Sequence[str]:
        return [one["id"] for one in json.load(urlopen(f"{self._url}/v1/models", timeout=5))["data"]]
