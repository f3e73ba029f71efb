"""Round times, measured by finished cells and stored for each target and sampling, for predictions.

Times of other depths and batch sizes are interpolated or extrapolated linearly; without enough points they are
rejected. `replay.py` counts the rounds of a sequence, and `questions.py` makes predictions.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.core.errors import ConfigurationError, TraceError
from paceline.draft_spec import DraftSpec, parse_draft
from paceline.experiments.config import DrafterEntry, ExperimentConfig, SamplingEntry
from paceline.experiments.store import CellResult
from paceline.experiments.trace import Trace
from paceline.registry import DRAFTERS

PLAIN = "none"
CHOICE = "choice:"
VERSION = 2
"""Version of the file."""

_Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Measured seconds of a round of the batch, by drafter, depth and batch size.

    rounds   (drafter by its `policy_name`, depth, batch size) -> seconds of a round, with drafting and the host's time
    prefill  seconds per prompt
    target, sampling  labels of the cells, where all are of one
    """

    rounds: Mapping[_Key, float]
    prefill: float = 0.0
    target: str = ""
    sampling: str = ""

    def seconds(self, drafter: str, k: int, batch_size: int) -> float:
        """Seconds of a round, between measured depths or batch sizes interpolated, beyond them extrapolated from the
        last two. A single measured depth and plain decoding, which is depth 0, make a line too.

        Raises:
            ConfigurationError: nothing was measured for this drafter, or only one other depth or batch size.
        """
        sizes: dict[int, dict[int, float]] = {}
        for (name, depth, size), value in self.rounds.items():
            if name == drafter:
                sizes.setdefault(size, {})[depth] = value
        if not sizes:
            names = ", ".join(sorted({name for name, *_ in self.rounds}))
            raise ConfigurationError(
                f"drafter: expected one of {names}, whose rounds were timed, got {drafter!r}; use one of them"
            )
        if batch_size in sizes:
            return self._at_depth(drafter, k, batch_size, depths=sizes[batch_size])
        if len(sizes) == 1:
            (size,) = sizes
            raise ConfigurationError(
                f"batch_size: rounds of {drafter!r} were timed only at batch size {size}, not {batch_size}; run the "
                f"experiment with batch_sizes: [{size}, {batch_size}]"
            )
        at_depth = {size: self._at_depth(drafter, k, size, depths=depths) for size, depths in sizes.items()}
        return _line(at_depth, batch_size)

    def _at_depth(self, drafter: str, k: int, size: int, *, depths: Mapping[int, float]) -> float:
        plain = self.rounds.get((PLAIN, 0, size))
        if plain is not None and (k < min(depths) or len(depths) == 1):
            depths = {0: plain, **depths}
        if k not in depths and len(depths) == 1:
            (depth,) = depths
            raise ConfigurationError(
                f"k: rounds of {drafter!r} were timed only with {depth} draft tokens at batch size {size}, not {k}; "
                f"run the experiment with k: [{depth}, {k}], or with `none` among its drafters"
            )
        return _line(depths, k)


def _line(points: Mapping[int, float], x: int) -> float:
    """Value on the line through the points around x, or through the last two on its side.

    More drafted tokens or requests never shorten a round, and a fraction of them takes at least that fraction of its
    time: lines distorted by noise are limited to that.
    """
    if x in points:
        return points[x]
    known = sorted(points)
    right = min(max(1, bisect_left(known, x)), len(known) - 1)
    a, b = known[right - 1], known[right]
    slope = (points[b] - points[a]) / (b - a)
    if x > b:
        return points[b] + max(0.0, slope) * (x - b)
    value = points[a] + slope * (x - a)
    return max(value, points[a] * x / a) if x < a else value


@dataclass(frozen=True, slots=True)
class ExperimentTimes:
    """All times of an experiment, by target and sampling."""

    parts: tuple[RoundTimes, ...]

    def of(self, trace: Trace) -> RoundTimes:
        """Times of a trace's target and sampling, else of all samplings of the target; ConfigurationError: it was not
        timed.
        """
        own = [one for one in self.parts if one.target == trace.target]
        if not own:
            names = ", ".join(dict.fromkeys(one.target for one in self.parts)) or "none"
            raise ConfigurationError(
                f"target: expected one of {names}, whose rounds were timed, got {trace.target}; use one of them"
            )
        sampling = SamplingEntry(**trace.sampling).label
        return _mean([one for one in own if one.sampling == sampling] or own)

    def alone(self) -> RoundTimes:
        """Times of the only target, all its samplings together; ConfigurationError: there are several."""
        targets = dict.fromkeys(one.target for one in self.parts)
        if len(targets) > 1:
            raise ConfigurationError(
                f"trace: expected one, since the experiment timed several targets ({', '.join(targets)}), got none; "
                "give a trace of the one you mean"
            )
        return _mean(self.parts)


def _mean(parts: Sequence[RoundTimes]) -> RoundTimes:
    rounds: dict[_Key, list[float]] = {}
    for one in parts:
        for key, seconds in one.rounds.items():
            rounds.setdefault(key, []).append(seconds)
    prefill = [one.prefill for one in parts]
    return RoundTimes({key: fmean(values) for key, values in rounds.items()}, fmean(prefill) if prefill else 0.0)


def measured(config: ExperimentConfig, results: Sequence[CellResult]) -> ExperimentTimes:
    """From finished cells with the rule ``match``; those of several prompt sets are means."""
    names = {one.label: policy_name(one, config) for one in config.drafters}
    parts: dict[tuple[str, str], list[RoundTimes]] = {}
    for one in _cells(results, names):
        parts.setdefault((one.target, one.sampling), []).append(one)
    return ExperimentTimes(
        tuple(replace(_mean(members), target=key[0], sampling=key[1]) for key, members in parts.items())
    )


def _cells(results: Sequence[CellResult], policies: Mapping[str, str]) -> Iterator[RoundTimes]:
    for result in results:
        names = result.names
        if result.error is not None or names["acceptor"] != "match" or result.totals["draft_lengths"]:
            continue
        groups: dict[int, int] = {}
        for row in result.rows:  # a group's rounds are those of its longest sequence
            groups[row["group"]] = max(groups.get(row["group"], 0), row["num_rounds"])
        depth = max((max(row["per_step_drafted"], default=0) for row in result.rows), default=0)
        k = names["k"] if isinstance(names["k"], int) else depth
        prefill = float(result.totals["prefill_seconds"])
        seconds = float(result.totals["seconds"]) - prefill
        rounds: dict[_Key, float] = {}
        if sum(groups.values()) and seconds > 0:
            name = policies.get(str(names["drafter"]), str(names["drafter"]))
            rounds[name, int(k), int(str(names["batch_size"]))] = seconds / sum(groups.values())
        each = prefill / max(1, len(result.rows))
        yield RoundTimes(rounds, each, str(names["target"]), str(names["sampling"]))


def policy_name(entry: DrafterEntry, config: ExperimentConfig) -> str:
    """Return the name by which a trace query selects a drafter of an experiment: a recorded one by its name in the
    experiment, a text drafter in the grammar of drafts, a list ``a+b``, a choice ``choice:a+b``.
    """
    specs = parse_draft(entry.draft)
    if not specs:
        return PLAIN
    if len(specs) > 1 or specs[0].parts:
        parts = "+".join(_part(spec, entry, config) for spec in specs[0].parts or specs)
        return CHOICE + parts if specs[0].parts else parts
    return str(specs[0]) if reads_text_alone(specs[0]) else entry.label


def reads_text_alone(spec: DraftSpec) -> bool:
    """Whether it is a drafter that is made by its name and needs no model."""
    return spec.name is not None and DRAFTERS[spec.name].given_as == "name"


def _part(spec: DraftSpec, entry: DrafterEntry, config: ExperimentConfig) -> str:
    """Name of a part of a list or a choice: that of the drafter of the experiment that it equals, if there is one."""
    if reads_text_alone(spec):
        return str(spec)
    for one in config.drafters:
        alone = parse_draft(one.draft)
        if len(alone) == 1 and replace(alone[0], k=spec.k) == spec and one.vocabulary == entry.vocabulary:
            return one.label
    return str(spec)


def save_times(times: ExperimentTimes) -> str:
    parts = [asdict(one) | {"rounds": [[*key, value] for key, value in one.rounds.items()]} for one in times.parts]
    return json.dumps({"version": VERSION, "times": parts})


def load_times(path: Path) -> ExperimentTimes:
    """Read what `save_times` wrote, or raise TraceError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.get("version") != VERSION:
            raise TraceError(
                f"{path}: expected a file of this version, got another; run `paceline experiment run` again, which "
                "writes it and keeps finished cells"
            )
        return ExperimentTimes(tuple(map(_timed, values["times"])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            f"{path}: expected the times of rounds, got {error}; run `paceline experiment run`, which writes "
            "round_times.json"
        ) from error


def _timed(part: Mapping[str, Any]) -> RoundTimes:
    rounds = {(str(name), int(k), int(size)): float(seconds) for name, k, size, seconds in part["rounds"]}
    return RoundTimes(rounds, float(part["prefill"]), str(part["target"]), str(part["sampling"]))
