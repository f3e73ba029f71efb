"""The tables of docs/study.md and benchmarks/results/study.md, from the figures in benchmarks/results/study.json.

They are made again without the traces; what the figures are asked of them is in `study_figures.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from report_tables import number, table

BUSY = 1.0
"""Load of the machine, for each of its cores, above which a measured time is said to be of a busy machine."""

Figures = Mapping[str, Any]


def _by_target(figures: Figures) -> Iterator[tuple[str, list[Figures]]]:
    for target in dict.fromkeys(one["target"] for one in figures["traces"]):
        yield target, [one for one in figures["traces"] if one["target"] == target]


def _traces(figures: Figures) -> Iterator[tuple[str, str, Figures]]:
    """Every trace with its target and its sampling."""
    for target, traces in _by_target(figures):
        yield from ((target, _sampling(one), one) for one in traces)


def _sampling(trace: Figures) -> str:
    return f"T = {trace['temperature']:g}" if trace["temperature"] else "greedy"


def _bold(values: Sequence[float | None]) -> list[str]:
    best = max((round(one, 2) for one in values if one is not None), default=None)
    return ["" if v is None else f"**{v:.2f}**" if round(v, 2) == best else f"{v:.2f}" for v in values]


def drafters(figures: Figures) -> str:
    parts = []
    for target, traces in _by_target(figures):
        names = list(dict.fromkeys(name for one in traces for name in one["drafters"]))
        columns = [_bold([one["drafters"].get(name, {}).get("tokens_per_round") for name in names]) for one in traces]
        rows = [(name, *(column[i] for column in columns)) for i, name in enumerate(names)]
        size = f"{traces[0]['texts']} texts, {', '.join(str(one['new_tokens']) for one in traces)} tokens"
        parts.append(f"{target} ({size}):\n\n" + table(" | ".join(["drafter", *map(_sampling, traces)]), rows))
    return "\n\n".join(parts)


def depths(figures: Figures) -> str:
    """Tokens per round against the number of drafted tokens."""
    rows = []
    every = sorted({k for one in figures["traces"] for known in one["depths"].values() for k in known}, key=int)
    for target, sampling, one in _traces(figures):
        for name, known in one["depths"].items():
            rows.append((target, sampling, name, *(number(known.get(k)) for k in every)))
    return table(" | ".join(["target | sampling | drafter", *(f"k = {k}" for k in every)]), rows)


def categories(figures: Figures) -> str:
    """By kind of prompt, where a trace has more than one."""
    parts = []
    for target, sampling, one in _traces(figures):
        if len(one["categories"]) > 1:
            names = list(one["drafters"])
            rows = [
                (kind, *_bold([one["drafters"][name]["by_category"][kind] for name in names]))
                for kind in one["categories"]
            ]
            parts.append(f"{target}, {sampling}, tokens per round:\n\n" + table(" | ".join(["prompts", *names]), rows))
    return "\n\n".join(parts) or "Not recorded yet: `make study-counts`."


def batches(figures: Figures) -> str:
    """Rounds of plain decoding for one of speculative decoding, in batches."""
    rows = []
    sizes = sorted({int(size) for one in figures["traces"] for row in one["batches"].values() for size in row})
    for target, sampling, one in _traces(figures):
        for name, row in one["batches"].items():
            rows.append((target, sampling, name, *(number(row.get(str(size))) for size in sizes)))
    return table(" | ".join(["target | sampling | drafter", *(f"batch {size}" for size in sizes)]), rows)


def choice(figures: Figures) -> str:
    """Loss of a choice at run time against the best fixed drafter, and gain against the worst."""
    rows = []
    for target, sampling, one in _traces(figures):
        asked, against = one["choice"], ("best_fixed", "worst_fixed", "a_perfect_choice")
        regrets = (f"{asked[f'regret_against_{who}']:+.0%}" for who in against)
        rows.append((target, sampling, asked["rounds"]["choice"], asked["best_fixed"], *regrets))
    return table("target | sampling | rounds | best fixed | against it | the worst | a perfect choice", rows)


def rules(figures: Figures) -> str:
    """Mean acceptance length of both rules, with intervals."""
    rows = []
    for one in figures["rules"]:
        match, reject = one["match"], one["reject"]
        said = (f"{value:.2f} [{low:.2f}, {high:.2f}]" for value, low, high in (match, reject))
        rows.append((one["target"], one["drafter"], one["k"], *said, f"{1 - match[0] / reject[0]:.0%}"))
    head = "target | drafter | k | `match` | `reject` | given up by `match`"
    return table(head, rows) if rows else "Not run yet: `make study-counts`."


def speed(figures: Figures) -> str:
    rows = [
        (one["target"], one["drafter"], one["k"], one["sampling"], one["batch_size"], f"{one['speedup']:.2f}")
        for one in figures["cells"]
    ]
    if not rows:
        return "Not measured yet: `make study`, on a quiet machine."
    loads = [one["provenance"]["load"] / one["provenance"]["cores"] for one in figures["cells"]]
    busy = sum(load > BUSY for load in loads)
    said = f"\n\n{busy} of these {len(rows)} cells began on a busy machine (load above {BUSY:g} a core)."
    return table("target | drafter | k | sampling | batch | times plain decoding", rows) + (said if busy else "")


def predictions(figures: Figures) -> str:
    """Prediction of the speed planner before a run, and the run's result."""
    rows = [
        (
            load["trace"].partition(",")[0],
            load["batch_size"],
            load["verdict"],
            *(one["label"], f"{one['predicted']:.1f}", f"{one['measured']:.1f}", f"{one['error']:+.0%}"),
        )
        for load in figures["predictions"]
        for one in load["verified"]
    ]
    head = "target | load | verdict | what was run | tokens/s predicted | measured | error"
    return table(head, rows) if rows else "Not measured yet: `make study`, on a quiet machine."


def source(figures: Figures) -> str:
    """With what, and when, the traces were recorded."""
    lines = []
    for target, traces in _by_target(figures):
        seen = dict.fromkeys((one["provenance"]["time"][:10], one["provenance"]["git_commit"]) for one in traces)
        lines.append(f"{target}: {'; '.join(f'recorded on {day} at {commit}' for day, commit in seen)}")
    one = figures["provenance"]
    return f"{'. '.join(lines)}. {one['cores']} cores, {one['processor']}."


BLOCKS: dict[str, Callable[[Figures], str]] = {
    "drafters": drafters,
    "depths": depths,
    "categories": categories,
    "batches": batches,
    "choice": choice,
    "rules": rules,
    "speed": speed,
    "predictions": predictions,
    "source": source,
}
