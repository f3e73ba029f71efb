"""Tests of `paceline verify` on drafting: the target as its own draft, and a drafter that reads a text anew.

Tokens do not depend on a drafter, so a drafter with a wrong cache is no wrong text; it is slow, and nothing else says
so. Not here: tests of tokens (`verify_tokens`) and of distributions (`verify_distribution`).
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from paceline.core.acceptance.base import keeps_tokens
from paceline.core.errors import ConfigurationError
from paceline.diagnostics.findings import Finding, Status, detected_share
from paceline.diagnostics.verify_subject import Budget, Subject
from paceline.generator import SpeculativeGenerator

_WIDTHS_CHANGE = 0.02
"""Share of its own drafts that a target may refuse where bits depend on the width of a graph."""


def self_draft(subject: Subject, budget: Budget) -> Finding:
    """The target drafts for itself: all of it is accepted, at every depth, or a row of a cache is wrong."""
    name, begin = "self-draft", perf_counter()
    try:
        twin = subject.target.sibling()
    except ConfigurationError as error:
        return Finding(name, "skipped", "nothing", str(error))
    rule = subject.rule.name if subject.rule.name in ("match", "reject") else "match"
    depths = sorted({1, max(2, subject.depth)})
    drafted = accepted = number = 0
    generators = [SpeculativeGenerator(twin, subject.target, k=k, acceptor=rule) for k in depths]
    while budget.left(number, len(generators)):
        generator = generators[number % len(generators)]
        drawing: dict[str, Any] = {"do_sample": subject.sampled and number % 4 > 1, "seed": subject.seed + number}
        group = subject.group(number, subject.slots)
        statistics = subject.texts(generator, group, eos_token_id=[], **drawing).statistics
        drafted, accepted = drafted + statistics.num_draft_tokens, accepted + statistics.num_accepted_tokens
        number += 1
    refused = drafted - accepted
    allowed = 0 if subject.invariant and rule == "match" else int(drafted * _WIDTHS_CHANGE)
    status: Status = "ok" if refused <= allowed and drafted else "FAILED"
    tried = f"{drafted} tokens in {number} calls, depths {', '.join(map(str, depths))}, acceptor {rule}"
    seen = f"{accepted} of {drafted} drafted tokens were accepted"
    return Finding(name, status, tried, seen, detected_share(drafted), perf_counter() - begin)


def read_anew(subject: Subject, budget: Budget) -> Finding:
    """Rounds in the middle of a text against rounds behind the same text as a prompt: the same is drafted."""
    name, begin = "drafter's memory", perf_counter()
    if not keeps_tokens(subject.rule) or not subject.depth:
        return Finding(
            name, "skipped", "nothing", "a text must not depend on its drafts, and something must be drafted"
        )
    compared = number = 0
    other: list[str] = []
    while budget.left(number, 1):
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
                continue  # reading decides a near-tie another way
            compared += 1
            if (rest[0].drafted, rest[0].accepted) != (drafted, accepted):
                other.append(f"behind {length} tokens {rest[0].accepted} of {rest[0].drafted} are accepted")
                other[-1] += f", in the course of the text {accepted} of {drafted}"
        number += 1
    seen = f"{len(other)} of {compared} rounds draft other tokens once the text is read anew"
    if other:
        seen += f": {'; '.join(other[:2])}. Either the drafter learns from texts, or its cache is not that of the text"
    tried = f"rounds of {number} texts"
    return Finding(name, "note" if other else "ok", tried, seen, detected_share(compared), perf_counter() - begin)
