"""The figures of docs/study.md, asked of the traces and results of its experiments; the page has them between markers.

A block stands between `<!-- study:NAME -->` and `<!-- /study -->`; the text around it is written by hand and says
nothing that other figures would make wrong. `collect` writes benchmarks/results/study.json, from which the blocks are
made, so that a page is made again without the traces. Nothing is measured here.

    python scripts/study_page.py --collect build/study    from the folders of scripts/study
    python scripts/study_page.py [--check]                the page alone
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from report_tables import table

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "benchmarks" / "results" / "study.json"
PAGE = ROOT / "docs" / "study.md"
TEXT_DRAFTERS = ("suffix", "ngram")
DEPTH = 4
_SOURCE = ("git_commit", "processor", "cores", "load", "time")


def collect(out: Path) -> dict[str, Any]:
    """Every trace below a folder, at one depth for all drafters, and the timed cells of its experiments."""
    from paceline.experiments.provenance import provenance
    from paceline.experiments.trace import load_trace

    traces = [_asked(load_trace(path)) for path in sorted(out.glob("*/traces/*.trace"))]
    source = {name: value for name, value in provenance().items() if name in _SOURCE}
    return {"depth": DEPTH, "traces": traces, "cells": list(_timed(out)), "provenance": source}


def _asked(trace: Any) -> dict[str, Any]:
    from paceline.experiments.definitions import Acceptance
    from paceline.experiments.whatif import Policy, ask, best_per_text

    chains = [one for one in trace.drafters if one.parents is None and not one.dynamic]
    policies = {one.name: Policy((one.name,), min(DEPTH, one.k)) for one in chains}
    policies |= {name: Policy((name,), DEPTH) for name in TEXT_DRAFTERS}
    answers = {name: ask(trace, policy) for name, policy in policies.items()}
    answers["choice"] = ask(trace, Policy.parse("choice:" + "+".join(policies), DEPTH))
    _, perfect = best_per_text(trace, list(policies.values()))
    categories = [text.category for text in trace.texts]
    found: dict[str, Any] = {}
    for name, answer in answers.items():
        rows = list(zip(categories, answer.replayed.requests, strict=True))
        found[name] = {
            "rounds": answer.acceptance.num_rounds,
            "tokens_per_round": answer.acceptance.tokens_per_round,
            "by_category": {
                category: Acceptance.pooled([one for other, one in rows if other == category]).tokens_per_round
                for category in sorted(set(categories))
            },
        }
    sampling = trace.sampling.get("temperature", 0)
    return {
        "target": trace.target,
        "temperature": sampling,
        "texts": len(trace.texts),
        "new_tokens": sum(len(text.tokens) for text in trace.texts),
        "drafters": found,
        "perfect_rounds": perfect.num_rounds,
    }


def _timed(out: Path) -> Iterator[dict[str, Any]]:
    from paceline.experiments.store import read_results

    for listed in sorted(out.glob("*/experiment.json")):
        for result in read_results(listed.parent):
            if result.error is None and result.totals.get("speedup"):
                yield {**result.names, **{name: result.totals[name] for name in ("speedup", "tokens_per_second")}}


def _fixed(trace: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in trace["drafters"].items() if name != "choice"}


def drafters(figures: Mapping[str, Any]) -> str:
    """Tokens a round of every drafter at one depth."""
    rows, said = [], []
    for trace in figures["traces"]:
        fixed = _fixed(trace)
        best = max(fixed, key=lambda name: fixed[name]["tokens_per_round"])
        for name, one in sorted(fixed.items(), key=lambda item: -item[1]["tokens_per_round"]):
            length = f"{one['tokens_per_round']:.2f}"
            rows.append((*_where(trace), name, f"**{length}**" if name == best else length, one["rounds"]))
        said.append(f"{trace['target']}, {_where(trace)[1]}: {best}")
    head = ("target", "sampling", "drafter", "tokens a round", "rounds")
    return table(head, rows) + "\n\nThe most tokens a round: " + "; ".join(said) + "."


def categories(figures: Mapping[str, Any]) -> str:
    """By kind of prompt, where a trace has more than one."""
    parts = []
    for trace in figures["traces"]:
        fixed = _fixed(trace)
        names = list(next(iter(fixed.values()))["by_category"])
        if len(names) < 2:
            continue
        rows = []
        for category in names:
            values = {name: one["by_category"][category] for name, one in fixed.items()}
            best = max(values, key=lambda name: values[name])
            rows.append((category, *(f"**{v:.2f}**" if n == best else f"{v:.2f}" for n, v in values.items())))
        parts.append(f"{trace['target']}, {_where(trace)[1]}, tokens a round:\n\n" + table(("prompts", *fixed), rows))
    return "\n\n".join(parts) or "Not recorded yet: `make study-counts`."


def choice(figures: Mapping[str, Any]) -> str:
    """What a choice at run time loses against the best fixed drafter, and wins against the worst."""
    rows = []
    for trace in figures["traces"]:
        fixed, chosen = {name: one["rounds"] for name, one in _fixed(trace).items()}, trace["drafters"]["choice"]
        best = min(fixed, key=lambda name: fixed[name])
        against = (fixed[best], max(fixed.values()), trace["perfect_rounds"])
        regrets = (f"{chosen['rounds'] / rounds - 1:+.0%}" for rounds in against)
        rows.append((*_where(trace), chosen["rounds"], best, *regrets))
    return table(("target", "sampling", "rounds", "best fixed", "against it", "the worst", "a perfect choice"), rows)


def speed(figures: Mapping[str, Any]) -> str:
    """Speed-ups of timed cells."""
    rows = [
        (one["target"], one["drafter"], one["k"], one["sampling"], one["batch_size"], f"{one['speedup']:.2f}")
        for one in figures["cells"]
    ]
    head = ("target", "drafter", "k", "sampling", "batch", "times plain decoding")
    return table(head, rows) if rows else "Not measured yet: `make study`, on a quiet machine."


def source(figures: Mapping[str, Any]) -> str:
    """When and with what the figures were asked of the traces."""
    one = figures["provenance"]
    return (
        f"Asked of the traces on {one['time'][:10]} at {one['git_commit']}, {one['cores']} cores, {one['processor']}."
    )


def _where(trace: Mapping[str, Any]) -> tuple[str, str]:
    return trace["target"], f"T = {trace['temperature']:g}" if trace["temperature"] else "greedy"


BLOCKS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "drafters": drafters,
    "categories": categories,
    "choice": choice,
    "speed": speed,
    "source": source,
}


def page(text: str, figures: Mapping[str, Any]) -> str:
    """The page with its blocks made anew; a marker with an unknown name is a KeyError."""
    return re.sub(
        r"(<!-- study:(\w+) -->\n).*?(<!-- /study -->)",
        lambda match: f"{match[1]}\n{BLOCKS[match[2]](figures)}\n\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


def main() -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", type=Path, help="folder of scripts/study, whose figures are kept")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the page is out of date")
    options = parser.parse_args()
    if options.collect is not None:
        FIGURES.write_text(json.dumps(collect(options.collect), indent=1) + "\n")
    current = PAGE.read_text()
    text = page(current, json.loads(FIGURES.read_text()))
    if options.check:
        return int(text != current)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
