"""Run of the best answer to a query, compared with plain decoding, and its models file for `paceline serve`."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigurationError, TraceError
from paceline.decoder.weights.folder import resolved
from paceline.draft_spec import DraftSpec, parse_draft
from paceline.experiments.config import (
    Cell,
    DrafterEntry,
    ExperimentConfig,
    PromptSet,
    SamplingEntry,
    TargetEntry,
    fingerprint,
    load_options,
)
from paceline.experiments.prompts import load_prompts
from paceline.experiments.questions import Policy, ask
from paceline.experiments.round_times import RoundTimes, policy_name
from paceline.experiments.store import CellResult
from paceline.experiments.trace import Trace, check_target
from paceline.text.tokenizer import load_tokenizer


def best_entry(config: ExperimentConfig, policy: Policy) -> tuple[DrafterEntry, int | None]:
    """The best policy as a drafter of the experiment, and its depth; ConfigurationError: a part of it is none."""
    if not policy.drafters:
        return DrafterEntry(draft="none"), None
    entries = {policy_name(one, config): one for one in config.drafters}
    whole = entries.get("+".join(policy.drafters))
    if whole is not None:
        return whole.model_copy(update={"k": None}), policy.k
    parts = [entries.get(name) or DrafterEntry(draft=name) for name in policy.drafters]
    drafts = list(chain.from_iterable(parse_draft(one.draft) for one in parts))
    return parts[-1].model_copy(update={"draft": [str(spec) for spec in drafts], "name": None, "k": None}), policy.k


def verifying(config: ExperimentConfig, trace: Trace, policy: Policy, *, batch_size: int) -> ExperimentConfig:
    """An experiment of the best policy and plain decoding with the target, sampling and prompts of a trace, or
    TraceError: it is not of this experiment, or files have changed.
    """
    targets = tuple(one for one in config.targets if one.label == trace.target)
    if not targets:
        names = ", ".join(one.label for one in config.targets)
        raise TraceError(
            f"trace: expected one of {names}, the experiment's targets, got one of {trace.target}; give a trace "
            "from its traces/ folder"
        )
    check_target(trace, fingerprint(targets[0].path), targets[0].path)
    entry, k = best_entry(config, policy)
    update: dict[str, Any] = {"drafters": (entry,), "batch_sizes": (batch_size,), "acceptors": ("match",)}
    update |= {"targets": targets[:1], "samplings": (SamplingEntry(**trace.sampling),)}
    update["prompt_sets"] = (_prompt_set(config, trace, targets[0]),)
    if k is not None:
        update["k"] = (k,)
    return config.model_copy(update={**update, "baseline": True, "traces": False, "name": "verify"})


def _prompt_set(config: ExperimentConfig, trace: Trace, target: TargetEntry) -> PromptSet:
    """The one whose prompts a trace has."""
    tokenizer, wanted = load_tokenizer(Path(target.path)), [text.prompt for text in trace.texts]
    for one in config.prompt_sets:
        if [row.ids for row in load_prompts(one, tokenizer, trace.vocab_size).rows] == wanted:
            return one
    names = ", ".join(one.label for one in config.prompt_sets)
    raise TraceError(
        f"trace: expected the experiment's prompts ({names}), got none of them, or others of that name; record it again"
    )


def predicted(trace: Trace, times: RoundTimes, policy: Policy, *, result: CellResult) -> float:
    """Tokens per second of a run of `verifying`, by measured times, or ConfigurationError: the run failed."""
    if result.error is not None:
        raise ConfigurationError(f"the run of {policy.label} failed ({result.error}); see its log")
    size = int(str(result.names["batch_size"]))
    return ask(trace, policy, batch_size=size, times=times, grouped=True).tokens_per_second or 0.0


def models_file(config: ExperimentConfig, policy: Policy, cell: Cell) -> str:
    """A models file for `paceline serve` with the best policy. Folders are absolute."""
    import yaml

    entry, k = best_entry(config, policy)
    model: dict[str, Any] = {"name": "tuned", "path": _absolute(cell.target.path), "batch_size": cell.batch_size}
    model |= load_options(config, cell.target)
    if not entry.plain:
        drafts = [_mapping(spec) for spec in parse_draft(entry.draft)]
        model["draft"] = drafts[0] if len(drafts) == 1 else drafts
        model |= {} if k is None else {"k": k}
        model |= {**config.speculative, **entry.speculative}
    text: str = yaml.safe_dump({"models": [model]}, sort_keys=False)
    return text


def _mapping(spec: DraftSpec) -> dict[str, object]:
    found: dict[str, object] = {} if spec.name is None else {"type": spec.name}
    if spec.path is not None:
        found["path"] = _absolute(spec.path)
    if spec.parts:
        found["drafts"] = [_mapping(part) for part in spec.parts]
    return {**found, **({} if spec.k is None else {"k": spec.k}), **dict(spec.options)}


def _absolute(path: str) -> str:
    return str(resolved(Path(path))) if Path(path).exists() else path
