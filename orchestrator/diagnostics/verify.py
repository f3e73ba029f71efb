"""`paceline verify`: do this target, this draft and this rule write what they promise? On models of the user's own.

Everything is tried through the public generator, so drafters, rules, processors and caches of the user's own are
verified like ours. What a test would have found is said beside what it found. Not here: whether a backend computes what
another one does (`paceline selftest`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from paceline.core.detokenizer import Decodes
from paceline.core.errors import ConfigurationError
from paceline.decoder.backends.base import sampling_refusal
from paceline.decoder.decoder import CompiledDecoder
from paceline.diagnostics import verify_distribution, verify_drafter, verify_tokens
from paceline.diagnostics.findings import Finding, Report
from paceline.diagnostics.verify_subject import Budget, Subject, own_prompts
from paceline.draft_checks import make_rule
from paceline.generator import SpeculativeGenerator

_LEAST_ROOM = 24  # positions that every text of a test needs behind its prompt
_Test = Callable[[Subject, Budget], Finding]


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """How much is tried, and on what.

    minutes           about so long, besides a first pass of every test, in which graphs are made
    only              names of tests (`TESTS`); none: all
    prompts           ids; default: what the target writes itself
    tokenizer         for stop strings; default: ids as numbers
    logits_processor  processors of your own; copied for every run
    max_new_tokens    of a text
    min_samples       texts, and tokens along texts, that the tests of distributions look at, whatever the time
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
            raise ConfigurationError(f"minutes={self.minutes} leaves no time; give more than 0")
        for name in self.only:
            if name not in TESTS:
                raise ConfigurationError(f"there is no test {name!r}; the tests are {', '.join(TESTS)}")
        if self.max_new_tokens < _LEAST_ROOM:
            raise ConfigurationError(f"max_new_tokens={self.max_new_tokens}: texts of tests need {_LEAST_ROOM} or more")


TESTS: dict[str, float] = {
    "greedy": 3.0,
    "sampled": 5.0,
    "ends": 2.0,
    "neighbours": 1.5,
    "repeats": 0.5,
    "processors": 1.5,
    "self-draft": 1.5,
    "memory": 1.0,
    "first-tokens": 3.0,
    "along-texts": 3.0,
}
"""Every test, and its share of the time."""

_DRAWN = ("sampled", "first-tokens", "along-texts")


def verify(
    target: CompiledDecoder,
    draft: object,
    settings: VerifySettings | None = None,
    *,
    say: Callable[[Finding], None] = lambda _finding: None,
    **options: Any,
) -> Report:
    """Test a pair.

    draft    as of `SpeculativeGenerator`: a name, a folder, a list, a drafter of your own, a function
    say      is told each finding
    options  of `SpeculativeGenerator`: k, acceptor, ...

    Raises:
        ConfigurationError: an option is out of range, or the target has too few positions.
        PairingError: draft and target do not fit.
    """
    settings = settings or VerifySettings()
    generator = SpeculativeGenerator(draft, target, **options)
    plain = SpeculativeGenerator(None, target, k=0)
    sampled = sampling_refusal(target.backend) is None
    known = [list(prompt) for prompt in settings.prompts] or own_prompts(plain, sampled=sampled, seed=settings.seed)
    longest = max(map(len, known))
    if longest + _LEAST_ROOM > target.n_positions:
        raise ConfigurationError(
            f"a prompt of {longest} tokens leaves fewer than {_LEAST_ROOM} of {target.n_positions} positions; give "
            "shorter prompts, or load the target with more n_positions"
        )
    rule = make_rule(generator.config)
    subject = Subject(generator, plain, rule, known, sampled, settings.seed, settings.max_new_tokens)
    for source in (plain, generator):  # makes graphs, outside of the budget
        subject.texts(source, subject.group(0, 1), max_new_tokens=min(8, subject.new))
    findings = []
    chosen = [
        name for name in TESTS if (not settings.only or name in settings.only) and (sampled or name not in _DRAWN)
    ]
    tests, whole = _tests(settings), sum(TESTS[name] for name in chosen)
    for name in chosen:
        findings.append(tests[name](subject, Budget(60 * settings.minutes * TESTS[name] / whole)))
        say(findings[-1])
    setting = {
        "target": str(target.folder or type(target).__name__),
        "draft": ", ".join(map(str, generator.config.draft)) or "none",
        "shape": str(generator.drafter.draft_shape),
        "acceptor": rule.name,
        "batch_size": target.batch_size,
        "backend": target.backend.name,
        "amp": target.options.amp,
        "seed": settings.seed,
    }
    return Report(setting, tuple(findings))


def _tests(settings: VerifySettings) -> dict[str, _Test]:
    return {
        "greedy": verify_tokens.greedy,
        "sampled": verify_tokens.sampled,
        "ends": partial(verify_tokens.ends, tokenizer=settings.tokenizer),
        "neighbours": verify_tokens.neighbours,
        "repeats": verify_tokens.repeats,
        "processors": partial(verify_tokens.processed, processors=settings.logits_processor),
        "self-draft": verify_drafter.self_draft,
        "memory": verify_drafter.read_anew,
        "first-tokens": partial(verify_distribution.first_tokens, least=settings.min_samples),
        "along-texts": partial(verify_distribution.along_texts, least=settings.min_samples),
    }
