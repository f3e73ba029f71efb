"""Figures of docs/study.md, computed from the traces and results of its experiments; saved in
benchmarks/results/study.json.

Acceptance, depths, batches and choices are exact answers of traces; rules, times and predictions are of runs. Nothing
is measured here. Not here: the page (`study_page.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import TraceError
from paceline.draft_checks import recognise
from paceline.draft_spec import parse_draft
from paceline.experiments.definitions import Acceptance
from paceline.experiments.questions import Policy, PolicyResult, ask, chain_policies, regret
from paceline.experiments.runner import provenance
from paceline.experiments.statistics import length_interval
from paceline.experiments.store import CellResult, read_results
from paceline.experiments.trace import Trace, load_trace

DEPTH = 4
DEPTHS = (1, 2, 4, 6)
BATCHES = (1, 2, 4)
_ANSWERS = {"SmolLM2-135M-Instruct": "suffix:corpus=examples/smollm2/answers.bin,min_match=1"}
"""Text drafters over answers that a target wrote before."""
_COUNTED = ("study-chat-counts", "study-counts")
"""Folders whose traces are counted; those of the timed experiment are of the same texts, and plans are made of them."""
_SOURCE = ("git_commit", "processor", "cores", "load", "time")


def collect(out: Path) -> dict[str, Any]:
    """Figures of the counted traces and of every result below the folder of scripts/study."""
    paths = [path for name in _COUNTED for path in sorted((out / name / "traces").glob("*.trace"))]
    traces = [asked(one) for path in paths if (one := _read(path)) is not None]
    results = [one for path in sorted(out.glob("*/experiment.json")) for one in read_results(path.parent)]
    finished = [one for one in results if one.error is None]
    return {
        "depth": DEPTH,
        "traces": sorted(traces, key=lambda one: (one["target"], one["temperature"])),
        "rules": list(_rules(finished)),
        "cells": list(_timed(finished)),
        "predictions": list(_predictions(out)),
        "provenance": _source(provenance()),
    }


def _read(path: Path) -> Trace | None:
    try:
        return load_trace(path)
    except TraceError as error:  # of an earlier version of the program, which recorded under another name
        print(f"left out: {error}", file=sys.stderr)
        return None


def asked(trace: Trace) -> dict[str, Any]:
    """Figures of a trace: every drafter at one depth, chains at several, batches, and a choice among the chains."""
    chains, plain = chain_policies(trace, DEPTH), Policy(())
    every = {**chains, **_others(trace, chains)}
    return {
        "target": trace.target,
        "temperature": trace.sampling.get("temperature", 0),
        "texts": len(trace.texts),
        "new_tokens": sum(len(text.tokens) for text in trace.texts),
        "categories": sorted({text.category for text in trace.texts}),
        "drafters": {name: _lengths(trace, ask(trace, policy)) for name, policy in every.items()},
        "depths": {name: dict(_depths(trace, name)) for name in chains},
        "batches": {
            name: {
                size: _rounds(trace, plain, size=size) / _rounds(trace, policy, size=size)
                for size in BATCHES
                if size <= len(trace.texts)
            }
            for name, policy in every.items()
        },
        "choice": regret(trace, k=DEPTH).to_dict(),
        "provenance": _source(trace.provenance),
    }


def _others(trace: Trace, chains: Collection[str]) -> dict[str, Policy]:
    """Trees as they were recorded, the target's own answers as a corpus, and text drafters in front of draft models."""
    found = {one.name: Policy((one.name,)) for one in trace.drafters if one.name not in chains}
    free = {"suffix": "suffix"}
    if trace.target in _ANSWERS:
        free["suffix with answers"] = _ANSWERS[trace.target]
        found["suffix with answers"] = Policy((_ANSWERS[trace.target],), DEPTH)
    for one in trace.drafters:
        path = parse_draft(json.loads(one.draft))[0].path
        if path is not None and recognise(path) == "model":  # heads cannot be in a list
            found |= {f"{name}, then {one.name}": Policy((text, one.name), DEPTH) for name, text in free.items()}
    return found


def _lengths(trace: Trace, answer: PolicyResult) -> dict[str, Any]:
    rows = list(zip(trace.texts, answer.replayed.requests, strict=True))
    return {
        "rounds": answer.acceptance.num_rounds,
        "tokens_per_round": answer.acceptance.tokens_per_round,
        "by_category": {
            category: Acceptance.pooled([one for text, one in rows if text.category == category]).tokens_per_round
            for category in sorted({text.category for text in trace.texts})
        },
    }


def _depths(trace: Trace, name: str) -> Iterator[tuple[int, float]]:
    """Tokens per round at those depths that the trace knows of a drafter."""
    recorded = next((one for one in trace.drafters if one.name == name), None)
    for k in DEPTHS:
        if recorded is None or (recorded.prefixes and k <= recorded.k):
            yield k, ask(trace, Policy((name,), k)).acceptance.tokens_per_round


def _rounds(trace: Trace, policy: Policy, *, size: int) -> int:
    """Rounds of the batch: each lasts until its slots have all been verified, whatever they accept."""
    return len(ask(trace, policy, batch_size=size).replayed.rounds)


def _rules(results: list[CellResult]) -> Iterator[dict[str, Any]]:
    """Both rules of every cell that was run with both."""
    groups: dict[str, dict[str, CellResult]] = {}
    for one in results:
        names = {name: value for name, value in one.names.items() if name != "acceptor"}
        groups.setdefault(json.dumps(names), {})[str(one.names["acceptor"])] = one
    for rules in groups.values():
        if {"match", "reject"} <= rules.keys():
            found = {name: length_interval(rules[name].rows) for name in ("match", "reject")}
            values = {name: [one.value, one.low, one.high] for name, one in found.items()}
            yield {**_names(rules["match"]), **values, "provenance": _source(rules["reject"].provenance)}


def _timed(results: list[CellResult]) -> Iterator[dict[str, Any]]:
    for one in results:
        if one.totals.get("speedup"):
            figures = {name: one.totals[name] for name in ("speedup", "tokens_per_second")}
            yield {**_names(one), **figures, "provenance": _source(one.provenance)}


def _predictions(out: Path) -> Iterator[dict[str, Any]]:
    """Output of `paceline plan-speed --verify --json`, a file for every trace."""
    for path in sorted(out.glob("*/plans/*.json")):
        plan = json.loads(path.read_text())
        for load in plan["loads"]:
            checks = [one for one in plan["verified"] if one["batch_size"] == load["batch_size"]]
            yield {"trace": path.stem, "batch_size": load["batch_size"], "verdict": load["verdict"], "verified": checks}


def _names(one: CellResult) -> dict[str, Any]:
    return {name: value for name, value in one.names.items() if name != "acceptor"}


def _source(values: Mapping[str, object]) -> dict[str, object]:
    return {name: values[name] for name in _SOURCE if name in values}
