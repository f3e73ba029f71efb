"""What is known of faults under load: rows, how they are written down, and the table of them. No faults in here."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.fault_clients import Stream, Whole


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row of the table; see `benchmarks.faults`."""

    fault: str
    streams: int
    equal: int
    typed: int
    broken: int
    different: int
    pause_s: float
    whole_s: float
    unanswered: int | None = None
    left: int | None = None


def outcome(fault: str, ended: Sequence[Stream], wanted: Sequence[str], whole: Whole) -> Outcome:
    """How streams ended, against their texts without a fault."""
    equal = sum(stream.text == text and not stream.error for stream, text in zip(ended, wanted, strict=True))
    typed, broken = (sum(stream.error == kind for stream in ended) for kind in ("typed", "broken"))
    pause = max((stream.pause_s for stream in ended), default=0.0)
    different = len(ended) - equal - typed - broken
    return Outcome(
        fault, len(ended), equal, typed, broken, different, round(pause, 1), round(whole.seconds, 1), whole.unanswered
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """The rows for a page, under the names that it has for processes."""
    lines = [
        "| fault | same text | error object | broken | longest pause, s | whole again, s | ready, no answer | left |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        names = one.fault.replace("model:big", "replica").replace("allocator", "core allocator")
        same = f"{one.equal} of {one.streams}" + (f" ({one.different} another)" if one.different else "")
        pause = None if one.broken == one.streams else one.pause_s  # of streams that went on after it
        numbers = (one.typed, one.broken, pause, one.whole_s, one.unanswered, one.left)
        cells = " | ".join("-" if number is None else str(number) for number in numbers)
        lines.append(f"| {names} | {same} | {cells} |")
    return "\n".join(lines)


class Record:
    """What this run saw, and earlier ones where there is a file. ``limit_s``: seconds after which no fault is begun."""

    def __init__(self, file: Path | None, limit_s: float) -> None:
        lines = file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else []
        self._file, self._end = file, time.monotonic() + limit_s
        self.outcomes = [Outcome(**json.loads(line)) for line in lines]

    def is_open(self, fault: str, streams: int) -> bool:
        """Whether it is to be tried now."""
        known = {(one.fault, one.streams) for one in self.outcomes}
        return (fault, streams) not in known and time.monotonic() < self._end

    def note(self, rows: Sequence[Outcome]) -> None:
        """Take down what was seen."""
        self.outcomes.extend(rows)
        for row in rows:
            print(row, flush=True)
            if self._file is not None:
                with self._file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(asdict(row)) + "\n")
