"""The fastest decoding method on Neuron chips, by arithmetic on published figures.

Figures and their sources are in `paceline.neuron.chips` and `paceline.placement.planning.instances`; none was
measured by us on a chip. Plans are defined in `paceline.experiments.questions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from paceline.core.errors import ConfigurationError
from paceline.core.types import SamplingKind
from paceline.decoder.models.config import ModelConfig
from paceline.experiments.questions import LoadPlan, SpeedEstimate, expected_tokens
from paceline.neuron import chips
from paceline.neuron.round_cost import PartTime, PartTimes, fits
from paceline.neuron.round_graphs import ModelDraft, RoundSetup
from paceline.placement.planning.instances import Instance

MESSAGE = 0.3e-3
"""Seconds per round for messages to another process: measured on a small virtual machine (docs/placement.md)."""


@dataclass(frozen=True, slots=True)
class HardwareQuestion:
    """Inputs of a plan.

    rates     conditional acceptance rates by position, and the error of each
    degrees   tensor-parallel degrees to try for the target; none: those of the instance
    rows      KV positions that a step reads
    """

    target: ModelConfig
    draft: ModelConfig
    instance: Instance
    rates: Sequence[float]
    rate_error: float = 0.05
    max_depth: int = 8
    degrees: Sequence[int] = ()
    kind: SamplingKind = "greedy"
    rows: int = 2048


@dataclass(frozen=True, slots=True)
class _Times:
    """Times for one degree of the target and one of the draft (None: it shares the target's cores)."""

    degree: int
    own: int | None
    verify: PartTimes
    drafts: PartTimes

    def round(self, k: int, slots: int) -> PartTime:
        """Return the time of a whole round: one launch if one graph holds both parts; otherwise two and a message."""
        host = chips.LAUNCH.value + (0.0 if self.own is None else chips.LAUNCH.value + MESSAGE)
        return self.verify.at(k, slots).plus(self.drafts.at(k, slots)).plus(PartTime(host, host, host))


def from_hardware(question: HardwareQuestion, batch_sizes: Sequence[int]) -> list[LoadPlan]:
    """Return a plan for every load, from bytes over bandwidth, operations, collectives and launches.

    Every candidate is computed three times, with ideal, expected and the worst times, and the interval of a speed-up is
    from the least to the largest. Asynchronous drafting, which overlaps drafting on separate cores with verification,
    is not included.

    Raises:
        ConfigurationError: the target fits at no degree, or the chip's figures are unknown.
    """
    most = max(batch_sizes)
    setup = RoundSetup(
        question.target,
        ModelDraft(question.draft),
        1,
        question.max_depth,
        question.kind,
        slots=most,
        rows=question.rows,
    )
    degrees = [d for d in question.degrees or question.instance.degrees if _divides(setup, d, question)]
    if not degrees:
        raise ConfigurationError(
            f"tp_degree: the target does not fit {question.instance.name} at any of the requested degrees; use a "
            "larger instance, or smaller batch sizes"
        )
    plain = {d: _parts(setup, question, d, drafts=False) for d in degrees}
    pairs = []
    drafting: dict[int, PartTimes] = {}
    for degree in degrees:
        for own in (None, *sorted({1, degree})):
            size = degree if own is None else own
            spare = own is None or degree + own <= question.instance.cores
            if spare and fits(replace(setup, degree=size), question.instance, draft=True, target=own is None):
                if size not in drafting:
                    drafting[size] = _parts(setup, question, size, drafts=True)
                pairs.append(_Times(degree, own, plain[degree], drafting[size]))
    return [_plan(question, size, plain=plain, pairs=pairs) for size in batch_sizes]


def _divides(setup: RoundSetup, degree: int, question: HardwareQuestion) -> bool:
    try:
        return fits(replace(setup, degree=degree), question.instance, draft=False, target=True)
    except ConfigurationError:
        return False


def _parts(setup: RoundSetup, question: HardwareQuestion, degree: int, *, drafts: bool) -> PartTimes:
    depths = (1 if drafts else 0, question.max_depth)
    return PartTimes(replace(setup, degree=degree), question.instance, drafts=drafts, depths=depths, slots=setup.slots)


def _plan(question: HardwareQuestion, size: int, *, plain: dict[int, PartTimes], pairs: Sequence[_Times]) -> LoadPlan:
    """Return a plan for one load. Speed-ups are relative to the fastest plain decoding, of any degree, under the same
    assumption.
    """
    launch = PartTime(*[chips.LAUNCH.value] * 3)
    alone = {degree: parts.at(0, size).plus(launch) for degree, parts in plain.items()}
    base = [min(getattr(time, name) for time in alone.values()) for name in PartTime.__slots__]
    candidates = [
        _rated(SpeedEstimate("plain", "", 0, size, 1.0, time.expected, (degree, 0)), time, base, tokens=(1.0, 1.0, 1.0))
        for degree, time in alone.items()
    ]
    for pair, k in product(pairs, range(1, question.max_depth + 1)):
        rates, error = question.rates, question.rate_error
        tokens = [
            expected_tokens([min(1.0, max(0.0, rate + off)) for rate in rates], k) for off in (-error, 0.0, error)
        ]
        time = pair.round(k, size)
        mode = "shared cores" if pair.own is None else "separate cores"
        made = SpeedEstimate(mode, "draft model", k, size, tokens[1], time.expected, (pair.degree, pair.own or 0))
        candidates.append(_rated(made, time, base, tokens=(tokens[0], tokens[1], tokens[2])))
    return LoadPlan(size, tuple(sorted(candidates, key=lambda one: -one.speedup)))


def _rated(
    candidate: SpeedEstimate, time: PartTime, base: Sequence[float], *, tokens: tuple[float, float, float]
) -> SpeedEstimate:
    ratios = [plain / own for plain, own in zip(base, (time.ideal, time.expected, time.worst), strict=True)]
    return replace(candidate, speedup=tokens[1] * ratios[1], low=tokens[0] * min(ratios), high=tokens[2] * max(ratios))
