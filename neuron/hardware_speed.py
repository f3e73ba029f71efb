"""The fastest decoding method on Neuron chips, by arithmetic on published figures.

Figures and their sources are in `paceline.neuron.chips` and `paceline.placement.planning.instances`; none was measured
by us on a chip. Plans are defined in `paceline.experiments.questions`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from paceline.core.errors import ConfigurationError
from paceline.core.types import SamplingKind
from paceline.decoder.models.config import ModelConfig
from paceline.experiments.questions import LoadPlan, SpeedEstimate, expected_tokens
from paceline.neuron import chips
from paceline.neuron.round_cost import PartTime, PartTimes, fits
from paceline.neuron.round_graphs import EagleDraft, RoundDraft, RoundSetup
from paceline.placement.planning.instances import Instance

MESSAGE = 0.3e-3
"""Seconds per round for messages to another process: measured on a small virtual machine (docs/placement.md)."""


@dataclass(frozen=True, slots=True)
class HardwareQuestion:
    """Inputs of a plan.

    draft         a model, or a head, which lives on the target's cores
    rates         conditional acceptance rates by position, and the error of each
    degrees       tensor-parallel degrees to try for the target; none: those of the instance
    rows          KV positions that a step reads
    quantization  of the target's weights; None: 16 bits
    """

    target: ModelConfig
    draft: RoundDraft
    instance: Instance
    rates: Sequence[float]
    rate_error: float = 0.05
    max_depth: int = 8
    degrees: Sequence[int] = ()
    kind: SamplingKind = "greedy"
    rows: int = 2048
    quantization: str | None = None


@dataclass(frozen=True, slots=True)
class _Times:
    """Times for one degree of the target and one of the draft (None: it shares the target's cores).

    ahead  the draft begins the next round while the target verifies, and what it drafted stands if every draft and its
           guess of the token after them are right
    """

    mode: str
    degree: int
    own: int | None
    verify: PartTimes
    drafts: PartTimes
    ahead: bool = False

    def round(self, k: int, slots: int, rates: Sequence[float]) -> PartTime:
        """Return the time of a whole round: one launch if one graph holds both parts; otherwise two and a message."""
        verify, drafts = self.verify.at(k, slots).plus(_LAUNCH), self.drafts.at(k, slots)
        if self.own is None:
            return verify.plus(drafts)
        apart = drafts.plus(_LAUNCH).plus(_MESSAGE)
        # All of the batch's drafts have to stand, or the draft model runs again for those that do not.
        stands = math.prod(_rate(rates, place) for place in range(k + 1)) ** slots if self.ahead else 0.0
        waited = [max(0.0, getattr(apart, name) - getattr(verify, name)) for name in PartTime.__slots__]
        return verify.plus(apart, 1 - stands).plus(PartTime(*waited), stands)


_LAUNCH, _MESSAGE = (PartTime(*[seconds] * 3) for seconds in (chips.LAUNCH.value, MESSAGE))


def _rate(rates: Sequence[float], place: int) -> float:
    return rates[min(place, len(rates) - 1)]


def from_hardware(question: HardwareQuestion, batch_sizes: Sequence[int]) -> list[LoadPlan]:
    """Return a plan for every load, from bytes over bandwidth, operations, collectives and launches.

    Every candidate is computed three times, with ideal, expected and the worst times, and the interval of a speed-up is
    from the least to the largest. Designs: a draft model sharded over the target's cores, or on cores of its own of any
    degree, which may draft ahead; a head sharded or replicated.

    Raises:
        ConfigurationError: the target fits at no degree, or the chip's figures are unknown.
    """
    setup = RoundSetup(
        question.target,
        question.draft,
        1,
        question.max_depth,
        question.kind,
        slots=max(batch_sizes),
        rows=question.rows,
        quantization=question.quantization,
    )
    degrees = [d for d in question.degrees or question.instance.degrees if _divides(setup, d, question)]
    if not degrees:
        raise ConfigurationError(
            f"tp_degree: the target does not fit {question.instance.name} at any of the requested degrees; use a "
            "larger instance, or smaller batch sizes"
        )
    plain = {d: _parts(setup, question, d, drafts=False) for d in degrees}
    pairs = [pair for degree in degrees for pair in _shared(setup, question, degree, verify=plain[degree])]
    if not isinstance(question.draft, EagleDraft):
        pairs += _separate(setup, question, plain)
    return [_plan(question, size, plain=plain, pairs=pairs) for size in batch_sizes]


def _shared(setup: RoundSetup, question: HardwareQuestion, degree: int, *, verify: PartTimes) -> list[_Times]:
    """Return the designs of one graph on the target's cores."""
    forms: dict[str, RoundDraft] = {"shared cores": question.draft}
    if isinstance(question.draft, EagleDraft) and degree > 1:
        forms = {f"shared cores, head {name}": replace(question.draft, divided=name == "sharded") for name in _FORMS}
    found = []
    for mode, draft in forms.items():
        formed = replace(setup, draft=draft)
        if fits(replace(formed, degree=degree), question.instance, draft=True, target=True):
            found.append(_Times(mode, degree, None, verify, _parts(formed, question, degree, drafts=True)))
    return found


_FORMS = ("sharded", "replicated")


def _separate(setup: RoundSetup, question: HardwareQuestion, plain: Mapping[int, PartTimes]) -> list[_Times]:
    """Return the designs of two processes: every degree of the draft that leaves the target its cores."""
    found, machine = [], question.instance
    for own in machine.degrees:
        beside = [degree for degree in plain if degree + own <= machine.cores]
        if beside and fits(replace(setup, degree=own), machine, draft=True, target=False):
            drafts = _parts(setup, question, own, drafts=True)
            for degree, ahead in product(beside, (False, True)):
                mode = "separate cores" + (", drafting ahead" if ahead else "")
                found.append(_Times(mode, degree, own, plain[degree], drafts, ahead))
    return found


def _divides(setup: RoundSetup, degree: int, question: HardwareQuestion) -> bool:
    try:
        return fits(replace(setup, degree=degree), question.instance, draft=False, target=True)
    except ConfigurationError:
        return False


def _parts(setup: RoundSetup, question: HardwareQuestion, degree: int, *, drafts: bool) -> PartTimes:
    depths = (1 if drafts else 0, question.max_depth)
    return PartTimes(replace(setup, degree=degree), question.instance, drafts=drafts, depths=depths, slots=setup.slots)


def _plan(question: HardwareQuestion, size: int, *, plain: dict[int, PartTimes], pairs: Sequence[_Times]) -> LoadPlan:
    """Return a plan for one load. Speed-ups are over the fastest plain decoding under the same assumption."""
    alone = {degree: parts.at(0, size).plus(_LAUNCH) for degree, parts in plain.items()}
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
        time = pair.round(k, size, rates)
        drafter = "head" if isinstance(question.draft, EagleDraft) else "draft model"
        made = SpeedEstimate(pair.mode, drafter, k, size, tokens[1], time.expected, (pair.degree, pair.own or 0))
        candidates.append(_rated(made, time, base, tokens=(tokens[0], tokens[1], tokens[2])))
    return LoadPlan(size, tuple(sorted(candidates, key=lambda one: -one.speedup)))


def _rated(
    candidate: SpeedEstimate, time: PartTime, base: Sequence[float], *, tokens: tuple[float, float, float]
) -> SpeedEstimate:
    ratios = [plain / own for plain, own in zip(base, (time.ideal, time.expected, time.worst), strict=True)]
    return replace(candidate, speedup=tokens[1] * ratios[1], low=tokens[0] * min(ratios), high=tokens[2] * max(ratios))
