"""`paceline verify`: check the promises of a target, a draft and a rule, on the user's models.

Everything runs through the public generator, so the user's drafters, rules, processors and caches are verified like
Paceline's. Each test reports its findings and its power. `paceline selftest` compares backends, and
`verify_distribution` tests distributions.

Tests of tokens: if a backend does not promise that a row's bits are independent of the width of its graph, a near-tie
of two tokens in the target's scores is counted and is not a failure. Tests of drafting: tokens do not depend on a
drafter, so a drafter with a wrong cache does not change outputs; it is slow, and only these tests find it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import zip_longest
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from paceline.checks.findings import Finding, Status
from paceline.checks.verify_distribution import along_texts, detected_share, first_tokens
from paceline.checks.verify_subject import Budget, CallResult, Subject, own_prompts
from paceline.core.acceptance.base import keeps_tokens
from paceline.core.detokenizer import Decodes
from paceline.core.errors import ConfigurationError
from paceline.core.sampling import Sampling, row_seed
from paceline.decoder.decoder import CompiledDecoder
from paceline.draft_checks import make_rule
from paceline.generator import SpeculativeGenerator

_LEAST_ROOM = 24  # positions that every sequence of a test needs after its prompt


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All findings about one target, one draft and one batch size. ``setting``: description of what was verified."""

    setting: Mapping[str, object]
    findings: Sequence[Finding]

    @property
    def passed(self) -> bool:
        return all(one.passed for one in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, **self.setting, "findings": [asdict(one) for one in self.findings]}

    def __str__(self) -> str:
        head = ", ".join(f"{name} {value}" for name, value in self.setting.items())
        lines = [head]
        for one in self.findings:
            lines.append(f"{one.status:7} {one.name} ({one.seconds:.1f} s): {one.seen}")
            lines.append(f"        tried: {one.tried}")
            if one.detects is not None:
                lines.append(f"        finds with 95 %: a deviation of {one.detects:.2g} in total variation")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """Extent and inputs of the tests.

    minutes           approximate duration, without a first pass of every test, in which graphs are made
    only              names of tests (`TESTS`); none: all
    prompts           ids; default: outputs of the target
    tokenizer         for stop strings; default: ids as numbers
    logits_processor  the user's processors; copied for every run
    max_new_tokens    of an output
    min_samples       minimum number of outputs, and of tokens along outputs, in the tests of distributions, regardless
                      of time
    """

    minutes: float = 2.0
    only: Sequence[str] = ()
    prompts: Sequence[Sequence[int]] = ()
    tokenizer: Decodes | None = None
    logits_processor: Sequence[Callable[..., Tensor]] = ()
    max_new_tokens: int = 40
    min_samples: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ConfigurationError(f"minutes: expected more than 0, got {self.minutes}; raise it")
        for name in self.only:
            if name not in TESTS:
                raise ConfigurationError(f"--only: expected {', '.join(TESTS)}, got {name!r}; use one of them")
        if self.max_new_tokens < _LEAST_ROOM:
            raise ConfigurationError(
                f"max_new_tokens: expected at least {_LEAST_ROOM} for the tests, got {self.max_new_tokens}; raise it"
            )


_DRAWN = ("sampled", "first-tokens", "along-texts")


def verify(
    target: CompiledDecoder,
    draft: object,
    settings: VerifySettings | None = None,
    *,
    say: Callable[[Finding], None] = lambda _finding: None,
    **options: Any,
) -> VerifyReport:
    """Test a pair.

    draft, options  as in `SpeculativeGenerator`
    say             receives each finding

    Raises:
        ConfigurationError: an option is out of range, or the target has too few positions.
        PairingError: draft and target do not fit.
    """
    settings = settings or VerifySettings()
    generator = SpeculativeGenerator(draft, target, **options)
    plain = SpeculativeGenerator(None, target, k=0)
    sampled = target.backend.sampling_refusal() is None
    known = [list(prompt) for prompt in settings.prompts] or own_prompts(plain, sampled=sampled, seed=settings.seed)
    longest = max(map(len, known))
    if longest + _LEAST_ROOM > target.n_positions:
        raise ConfigurationError(
            f"prompts: expected at least {_LEAST_ROOM} free positions of {target.n_positions} after each, got fewer "
            f"after one of {longest} tokens; give shorter prompts, or load the target with more n_positions"
        )
    subject = Subject(
        generator,
        plain,
        make_rule(generator.config),
        known,
        sampled,
        settings.seed,
        settings.max_new_tokens,
        settings.min_samples,
        settings.tokenizer,
        settings.logits_processor,
    )
    for source in (plain, generator):  # makes graphs, outside the time budget
        subject.texts(source, subject.group(0, 1), max_new_tokens=min(8, subject.new))
    findings = []
    chosen = [
        name for name in TESTS if (not settings.only or name in settings.only) and (sampled or name not in _DRAWN)
    ]
    whole = sum(TESTS[name][0] for name in chosen)
    for share, test in (TESTS[name] for name in chosen):
        begin = perf_counter()
        found = test(subject, Budget(60 * settings.minutes * share / whole))
        findings.append(replace(found, seconds=perf_counter() - begin))
        say(findings[-1])
    return VerifyReport(_setting(subject), tuple(findings))


def _setting(subject: Subject) -> dict[str, object]:
    generator, target = subject.generator, subject.target
    return {
        "target": str(target.folder or type(target).__name__),
        "draft": ", ".join(map(str, generator.config.draft)) or "none",
        "shape": str(generator.drafter.draft_shape),
        "acceptor": subject.rule.name,
        "batch_size": target.batch_size,
        "backend": target.backend.name,
        "amp": target.options.load.amp,
        "seed": subject.seed,
    }


SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.0},
    {"temperature": 1.2, "top_p": 0.9, "min_p": 0.02},
)

_NEAR = {"f32": 1e-3}
_NEAR_16_BITS = 0.15
"""Maximum difference of a near-tie, in logits: several times the observed differences between widths."""


@dataclass(slots=True)
class Tally:
    """Sequences compared with the expected ones. ``strict``: both use the same graphs, so that a near-tie must not
    differ; ``ties``: those that part at one.
    """

    strict: bool = False
    tokens: int = 0
    calls: int = 0
    accepted: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(
        self, subject: Subject, ours: CallResult, theirs: CallResult, *, sampling: Sequence[Sampling] | None = None
    ) -> None:
        """Compare outputs and finish reasons. ``sampling``: of every output, to detect near-ties; None = unknown."""
        self.calls += 1
        self.accepted += ours.statistics.num_accepted_tokens
        rows = zip(ours.texts, theirs.texts, ours.reasons, theirs.reasons, strict=True)
        for row, (text, known, reason, known_reason) in enumerate(rows):
            at = next((i for i, pair in enumerate(zip_longest(text, known)) if pair[0] != pair[1]), None)
            self.tokens += len(known) if at is None else at
            if at is None:
                if reason != known_reason:
                    self.wrong.append(f"text {row} ends by {reason!r} in place of {known_reason!r}")
                continue
            one = None if sampling is None else sampling[row]
            if at < min(len(text), len(known)) and self._nearly_tie(subject, text, known, at=at, one=one):
                self.ties += 1
            else:
                got, wanted = (one[at] if at < len(one) else "the end" for one in (text, known))
                self.wrong.append(f"text {row} has {got} at place {at} in place of {wanted}")

    def _nearly_tie(
        self,
        subject: Subject,
        text: list[int],
        known: list[int],
        *,
        at: int,
        one: Sampling | None,
    ) -> bool:
        if self.strict or subject.invariant:
            return False
        if one is None:
            return True  # judged by their number
        near = _NEAR.get(subject.target.options.load.amp, _NEAR_16_BITS)
        gap = subject.gap(text[:at], (text[at], known[at]), one)
        return gap < near / (one.temperature or 1.0)

    def finding(
        self,
        name: str,
        subject: Subject,
        *,
        tried: str,
        lossy: bool = False,
        theirs: str = "plain decoding",
    ) -> Finding:
        """Return the finding of all comparisons. ``lossy``: differences are expected from the rule."""
        wrong = list(self.wrong)
        if self.ties > max(3, subject.tolerated(self.tokens)):
            wrong.append(f"{self.ties} texts part at near-ties, which is too often for these")
        status: Status = "ok" if not wrong else "lossy" if lossy else "FAILED"
        seen = f"all are those of {theirs}" if not wrong else f"{len(wrong)} differ: {'; '.join(wrong[:3])}"
        if self.ties:
            seen += f"; {self.ties} texts part at a near-tie, which this backend may decide by a graph's width"
        what = f"{self.tokens} tokens in {self.calls} calls, {self.accepted} of them drafted and accepted; {tried}"
        return Finding(name, status, seen, what, detected_share(self.tokens))


def _greedy(subject: Subject, budget: Budget) -> Finding:
    """Texts at temperature 0: for every lossless rule those of plain decoding."""
    return _equal(subject, budget, name="greedy tokens", asked=({},), lossy=not subject.rule.lossless)


def _sampled(subject: Subject, budget: Budget) -> Finding:
    """Texts with the same seed; under rules that keep a distribution only, there is nothing to compare."""
    name = "sampled tokens"
    if not keeps_tokens(subject.rule):
        return Finding(name, "skipped", f"{subject.rule.name!r} does not promise tokens", "nothing")
    return _equal(subject, budget, name=name, asked=SAMPLED, lossy=False)


def _equal(subject: Subject, budget: Budget, *, name: str, asked: Sequence[dict[str, Any]], lossy: bool) -> Finding:
    tally = Tally()
    sizes = (1, subject.slots, 2 * subject.slots + 1)
    for number in budget.calls(len(sizes)):
        sampling, size = asked[number % len(asked)], sizes[(number + number // len(asked)) % len(sizes)]
        seeds = [row_seed(subject.seed + number, row) for row in range(size)]
        options = {**sampling, "do_sample": bool(sampling), "seed": seeds}
        group = subject.group(number, size)
        ours, theirs = (subject.texts(source, group, **options) for source in (subject.generator, subject.plain))
        tally.add(
            subject, ours, theirs, sampling=[Sampling(**{"temperature": 0.0, **sampling}, seed=seed) for seed in seeds]
        )
        if len(tally.wrong) > 20:
            break
    tried = f"calls of {', '.join(map(str, sorted(set(sizes))))} prompts in {subject.slots} slots"
    return tally.finding(name, subject, tried=tried, lossy=lossy)


class _IdText:
    """Tokenizer whose tokens are numbers."""

    def decode(self, token_ids: Any, **_: object) -> str:
        return "".join(f"<{int(token)}>" for token in token_ids)


def _ends(subject: Subject, budget: Budget) -> Finding:
    """Outputs stop where plain decoding stops: at an id, a stop string, a limit, a criterion, inside a draft or not."""
    tally = Tally()
    decoder = subject.tokenizer or _IdText()
    draws = subject.sampled and keeps_tokens(subject.rule)
    for number in budget.calls(2):
        group = subject.group(number, 1)
        drawing: dict[str, Any] = {"do_sample": draws and number % 2 == 1, "seed": subject.seed + number}
        text = subject.texts(subject.plain, group, eos_token_id=[], **drawing).texts[0][len(group[0]) :]
        one = Sampling(temperature=1.0 if drawing["do_sample"] else 0.0, seed=drawing["seed"])
        for stop in _stops(text, decoder, number, prompt=len(group[0])):
            ours, theirs = (subject.texts(s, group, **drawing, **stop) for s in (subject.generator, subject.plain))
            tally.add(subject, ours, theirs, sampling=[one])
        if len(tally.wrong) > 20:
            break
    tried = "ids, stop strings that end inside of a token, limits of length, criteria"
    return tally.finding("ends of texts", subject, tried=tried, lossy=not subject.rule.lossless)


def _stops(text: Sequence[int], decoder: Decodes, number: int, *, prompt: int) -> list[dict[str, Any]]:
    places = [place for place in (1 + number % 3, 4 + number % 2, 7, 12) if place + 1 < len(text)]
    stops: list[dict[str, Any]] = [{"max_new_tokens": limit} for limit in (1, 2, 3 + number % 5)]
    for place in places:
        stops.append({"eos_token_id": text[place]})
        stops.append({"eos_token_id": [], "stopping_criteria_list": [partial(_long, length=prompt + place)]})
        own, after = decoder.decode([text[place]]), decoder.decode([text[place + 1]])
        string = own[-2:] + after[:1]
        if string.strip() and "\ufffd" not in string:
            stops.append({"eos_token_id": [], "stop_strings": [string], "tokenizer": decoder})
    return stops


def _long(ids: Tensor, _scores: object = None, *, length: int) -> bool:
    return bool(ids.shape[1] >= length)


def _neighbours(subject: Subject, budget: Budget) -> Finding:
    """Test that a sequence is the same when decoded separately and in a batch, under every rule."""
    name, tally = "batch invariance", Tally()
    if subject.slots == 1:
        return Finding(name, "skipped", "there is one slot; load with a larger batch_size", "nothing")
    for number in budget.calls(2):
        drawing: dict[str, Any] = {"do_sample": subject.sampled and number % 2 == 0, "temperature": 0.9}
        seeds = [row_seed(subject.seed + number, row) for row in range(subject.slots + 1)]
        group = subject.group(number, subject.slots + 1)
        together = subject.texts(subject.generator, group, **drawing, seed=seeds)
        place = number % len(group)
        alone = subject.texts(subject.generator, group[place : place + 1], **drawing, seed=seeds[place : place + 1])
        beside = CallResult(together.texts[place : place + 1], together.reasons[place : place + 1], together.statistics)
        one = Sampling(temperature=0.9 if drawing["do_sample"] else 0.0, seed=seeds[place])
        tally.add(subject, beside, alone, sampling=[one] if keeps_tokens(subject.rule) else None)
    tried = f"texts with {subject.slots} others in {subject.slots} slots, and at batch size 1"
    return tally.finding(name, subject, tried=tried, theirs="the same texts at batch size 1")


def _repeats(subject: Subject, budget: Budget) -> Finding:
    """The same call gives the same texts again: nothing of a request is left for the next one."""
    tally = Tally(strict=True)
    for number in budget.calls(1):
        drawing: dict[str, Any] = {"do_sample": subject.sampled, "seed": subject.seed + number}
        group = subject.group(number, subject.slots)
        first, again = (subject.texts(subject.generator, group, **drawing) for _ in range(2))
        tally.add(subject, again, first)
    finding = tally.finding("repeated calls", subject, tried="each call twice", theirs="the first call")
    if finding.status == "FAILED" and not keeps_tokens(subject.rule):
        why = "a drafter that learns from texts changes them under a rule that keeps the distribution alone"
        return replace(finding, status="note", seen=f"{finding.seen}; {why}")
    return finding


def _processed(subject: Subject, budget: Budget) -> Finding:
    """Check that logits processors give the tokens of plain decoding, and see the same prefixes."""
    name, tally = "logits processors", Tally()
    if not subject.rule.on_host:
        return Finding(name, "skipped", f"{subject.rule.name!r} decides on the device, without processors", "nothing")
    draws = subject.sampled and keeps_tokens(subject.rule)
    kinds: list[tuple[dict[str, Any], list[Callable[..., Tensor]]]] = [({"repetition_penalty": 1.3}, [])]
    kinds += [({}, list(subject.processors))] if subject.processors else []
    for number in budget.calls(len(kinds)):
        options, own = kinds[number % len(kinds)]
        drawing = {**options, "do_sample": draws and number % 2 == 1, "seed": subject.seed + number}
        group = subject.group(number, 1)
        watches = (_Watching(), _Watching())
        ours, theirs = (
            subject.texts(source, group, **drawing, logits_processor=[*copy.deepcopy(own), watch])
            for source, watch in zip((subject.generator, subject.plain), watches, strict=True)
        )
        tally.add(subject, ours, theirs)
        if keeps_tokens(subject.rule) and ours.texts == theirs.texts and watches[0].seen != watches[1].seen:
            tally.wrong.append("processors are called with other prefixes than by plain decoding")
    names = ["a repetition penalty", *(type(one).__name__ for one in subject.processors)]
    return tally.finding(name, subject, tried=f"{', '.join(names)}, and one that notes its calls")


class _Watching:
    """Processor that notes the prefixes it is shown."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(hash(tuple(torch.as_tensor(input_ids)[0].tolist())))
        return scores


_WIDTHS_CHANGE = 0.02
"""Share of its own drafts that a target may reject if bits depend on the width of a graph."""


def _self_draft(subject: Subject, budget: Budget) -> Finding:
    """The target drafts for itself: all of it is accepted, at every depth, or a row of a cache is wrong."""
    name = "self-draft"
    try:
        twin = subject.target.sibling()
    except ConfigurationError as error:
        return Finding(name, "skipped", str(error), "nothing")
    rule = subject.rule.name if subject.rule.name in ("match", "reject") else "match"
    depths = sorted({1, max(2, subject.depth)})
    drafted = accepted = 0
    generators = [SpeculativeGenerator(twin, subject.target, k=k, acceptor=rule) for k in depths]
    for number in budget.calls(len(generators)):
        generator = generators[number % len(generators)]
        drawing: dict[str, Any] = {"do_sample": subject.sampled and number % 4 > 1, "seed": subject.seed + number}
        group = subject.group(number, subject.slots)
        statistics = subject.texts(generator, group, eos_token_id=[], **drawing).statistics
        drafted, accepted = drafted + statistics.num_draft_tokens, accepted + statistics.num_accepted_tokens
    refused = drafted - accepted
    allowed = 0 if subject.invariant and rule == "match" else int(drafted * _WIDTHS_CHANGE)
    status: Status = "ok" if refused <= allowed and drafted else "FAILED"
    tried = f"{drafted} tokens in {number + 1} calls, depths {', '.join(map(str, depths))}, acceptor {rule}"
    seen = f"{accepted} of {drafted} drafted tokens were accepted"
    return Finding(name, status, seen, tried, detected_share(drafted))


def _read_anew(subject: Subject, budget: Budget) -> Finding:
    """Rounds in the middle of a sequence have the drafts of rounds after the same tokens as a prompt."""
    name = "drafter's memory"
    if not keeps_tokens(subject.rule) or not subject.depth:
        why = "a text must not depend on its drafts, and something must be drafted"
        return Finding(name, "skipped", why, "nothing")
    compared = 0
    other: list[str] = []
    for number in budget.calls(1):
        prompt = subject.group(number, 1)[0]
        drawing: dict[str, Any] = {"do_sample": subject.sampled and number % 2 == 1, "seed": subject.seed + number}
        longest = len(prompt) + min(subject.new, subject.room(prompt))
        drawing["sequence_length"] = longest
        outputs = list(subject.generator.stream([prompt], eos_token_id=[], **drawing))
        text, rounds = [*prompt], []
        for output in outputs:
            rounds.append((len(text), output.drafted, output.accepted))
            text += output.tokens
        for length, drafted, accepted in rounds[1 :: max(1, len(rounds) // 4)]:
            if length >= longest - 1:
                continue
            first, *rest = subject.generator.stream([text[: length - 1]], eos_token_id=[], **drawing)
            if tuple(first.tokens) != (text[length - 1],) or not rest:
                continue  # prefill decides a near-tie differently
            compared += 1
            if (rest[0].drafted, rest[0].accepted) != (drafted, accepted):
                other.append(f"after {length} tokens {rest[0].accepted} of {rest[0].drafted} are accepted")
                other[-1] += f", in the course of the text {accepted} of {drafted}"
    seen = f"{len(other)} of {compared} rounds draft other tokens once the text is read again"
    if other:
        seen += f": {'; '.join(other[:2])}. Either the drafter learns from texts, or its cache is not that of the text"
    tried = f"rounds of {number + 1} texts"
    return Finding(name, "note" if other else "ok", seen, tried, detected_share(compared))


TESTS: dict[str, tuple[float, Callable[[Subject, Budget], Finding]]] = {
    "greedy": (3.0, _greedy),
    "sampled": (5.0, _sampled),
    "ends": (2.0, _ends),
    "neighbours": (1.5, _neighbours),
    "repeats": (0.5, _repeats),
    "processors": (1.5, _processed),
    "self-draft": (1.5, _self_draft),
    "memory": (1.0, _read_anew),
    "first-tokens": (3.0, first_tokens),
    "along-texts": (3.0, along_texts),
}
"""All tests, with their shares of the time."""
