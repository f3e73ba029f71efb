"""Regret of choosing among drafters at run time, against the best fixed one and a perfect choice for every text.

Exact, on a trace of `paceline experiment run` (traces: true): no model is loaded, no time is measured, and a busy
machine changes nothing. Rounds are counted, for a choice that goes by accepted tokens; text drafters need no recording.

    python benchmarks/choice.py build/study/study-counts/traces/NAME.trace --drafters "draft model,EAGLE-3" --k 4
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from paceline.experiments.trace import load_trace
from paceline.experiments.whatif import Policy, ask, best_per_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--drafters", default="", help="names, divided by commas; default: all that were recorded")
    parser.add_argument("--k", type=int, default=4, help="drafted tokens a round")
    parser.add_argument("--shadow-every", type=int, default=8)
    asked = parser.parse_args()
    trace = load_trace(asked.trace)
    names = asked.drafters.split(",") if asked.drafters else [one.name for one in trace.drafters]
    fixed = {name: ask(trace, Policy((name,), asked.k)).acceptance for name in names}
    choice = ask(trace, Policy(tuple(names), asked.k, shadow_every=asked.shadow_every)).acceptance
    _, perfect = best_per_text(trace, [Policy((name,), asked.k) for name in names])
    best = min(fixed, key=lambda name: fixed[name].num_rounds)
    figures = {
        "trace": asked.trace.name,
        "k": asked.k,
        "new_tokens": choice.new_tokens,
        "rounds": {**{name: one.num_rounds for name, one in fixed.items()}, "choice": choice.num_rounds},
        "rounds_of_a_perfect_choice_for_every_text": perfect.num_rounds,
        "best_fixed": best,
        "regret_against_best_fixed": choice.num_rounds / fixed[best].num_rounds - 1,
        "regret_against_worst_fixed": choice.num_rounds / max(one.num_rounds for one in fixed.values()) - 1,
        "regret_against_a_perfect_choice": choice.num_rounds / perfect.num_rounds - 1,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
