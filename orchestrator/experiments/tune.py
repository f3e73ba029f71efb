"""Search for the best way to draft, on the texts of a trace: drafters, depths, and a text drafter in front of them.

Drafters and depths are a small grid, and what-if answers a point of it without a model, so all is looked at.
Thresholds of confidence are no grid: optuna's sampler looks for them among the best of it. The best of all is then
run beside plain decoding, and written as a models file that `paceline serve` reads. Speed is predicted from times of
rounds that the experiment measured. Not here: the questions themselves (`whatif.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
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
from paceline.experiments.round_times import CHOICE, PLAIN, RoundTimes, policy_name, reads_text_alone
from paceline.experiments.store import CellResult
from paceline.experiments.trace import RecordedDrafter, Trace, check_target
from paceline.experiments.whatif import Answer, Policy, ask
from paceline.text.tokenizer import load_tokenizer

log = logging.getLogger("paceline")


def search(trace: Trace, times: RoundTimes, *, batch_size: int, max_depth: int = 8) -> list[Answer]:
    """All points of the grid whose rounds can be timed, the fastest first; plain decoding is one of them.

    A drafter that was timed and cannot be asked is left out, which is logged with the reason.

    Raises:
        ConfigurationError: plain decoding was not timed, or not at this batch size nor at two others.
    """
    timed = {name for name, *_ in times.rounds}
    if PLAIN not in timed:
        raise ConfigurationError("plain decoding was not timed; put `none` among the drafters of the experiment")
    answers = [ask(trace, Policy(()), batch_size=batch_size, times=times)]
    for name in sorted(timed - {PLAIN}):
        try:
            policies = list(_grid(trace, name, max_depth))
            answers += [ask(trace, policy, batch_size=batch_size, times=times) for policy in policies]
        except ConfigurationError as error:
            log.warning("%s is left out: %s", name, error)
    return sorted(answers, key=lambda answer: -(answer.tokens_per_second or 0.0))


def _grid(trace: Trace, name: str, max_depth: int) -> Iterator[Policy]:
    """Every depth at which a timed drafter can be asked about.

    Raises:
        ConfigurationError: it, or a part of it, is neither recorded nor looks at the text alone.
    """
    recorded = {one.name: one for one in trace.drafters}
    if name in recorded:
        yield from (Policy((name,), k) for k in _depths(recorded[name], max_depth))
        return
    if name.startswith(CHOICE):
        raise ConfigurationError("a choice goes by measured times, which no trace knows; run it in an experiment")
    parts = tuple(name.split("+"))
    for part in parts:
        if part not in recorded and not _is_text(part):
            trace.drafter(part)  # says which there are
    yield from (Policy(parts, k) for k in range(1, max_depth + 1))


def search_thresholds(
    trace: Trace, times: RoundTimes, answers: Sequence[Answer], *, batch_size: int, trials: int, seed: int = 0
) -> list[Answer]:
    """The same answers and those with a threshold of confidence, the fastest first; without a threshold among equals.

    A draft model drafts in a graph of one length, so that what a threshold drops saves no time of its own: it pays
    where another drafter of a list then has a turn. Nothing is tried where no threshold is known.

    answers  of `search`; its five fastest that have a draft model with recorded confidence get thresholds
    trials   thresholds to try, by Parzen estimators (TPE, Bergstra et al., 2011)
    """
    known = {one.name for one in trace.drafters if one.confidences is not None}
    bases = [one.policy for one in answers if known.intersection(one.policy.drafters)][:5]
    if not bases or not trials:
        return list(answers)
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    found: list[Answer] = []

    def speed(trial: optuna.Trial) -> float:
        base = bases[trial.suggest_categorical("policy", list(range(len(bases))))]
        policy = replace(base, confidence=trial.suggest_float("confidence", 0.0, 1.0))
        found.append(ask(trace, policy, batch_size=batch_size, times=times))
        return found[-1].tokens_per_second or 0.0

    study.optimize(speed, n_trials=trials)
    return sorted([*answers, *found], key=lambda answer: -(answer.tokens_per_second or 0.0))


def _depths(drafter: RecordedDrafter, most: int) -> Sequence[int | None]:
    """Those that a recording knows: all up to its own, or its own alone."""
    return range(1, min(most, drafter.k) + 1) if drafter.prefixes and drafter.parents is None else (None,)


def _is_text(name: str) -> bool:
    specs = parse_draft(name)
    return len(specs) == 1 and reads_text_alone(specs[0])


def best_entry(config: ExperimentConfig, policy: Policy) -> tuple[DrafterEntry, int | None]:
    """The best policy as a drafter of the experiment, with its options and files, and the depth.

    Raises:
        ConfigurationError: one of its parts is no drafter of the experiment.
    """
    if not policy.drafters:
        return DrafterEntry(draft="none"), None
    entries = {policy_name(one, config): one for one in config.drafters}
    whole = entries.get("+".join(policy.drafters))
    sure = {} if policy.confidence is None else {"confidence_threshold": policy.confidence}
    if whole is not None:
        return whole.model_copy(update={"k": None, **sure}), policy.k
    parts = [entries.get(name) or DrafterEntry(draft=name) for name in policy.drafters]
    drafts = list(chain.from_iterable(parse_draft(one.draft) for one in parts))
    update = {"draft": [str(spec) for spec in drafts], "name": None, "k": None, **sure}
    return parts[-1].model_copy(update=update), policy.k


def verifying(config: ExperimentConfig, trace: Trace, policy: Policy, *, batch_size: int) -> ExperimentConfig:
    """An experiment of the best policy alone, beside plain decoding, with the target, sampling and prompts of a trace.

    Raises:
        TraceError: the trace is not of this experiment: of another target or other prompts, or their files are others
            by now.
    """
    targets = tuple(one for one in config.targets if one.label == trace.target)
    if not targets:
        names = ", ".join(one.label for one in config.targets)
        raise TraceError(f"the trace is of {trace.target}, and the experiment of {names}; give one of its own traces/")
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
    raise TraceError(f"the trace has none of the experiment's prompts ({names}), or they changed; record it again")


@dataclass(frozen=True, slots=True)
class Check:
    """A run of the best policy: tokens per second as predicted for it, measured, and of plain decoding beside it."""

    predicted: float
    measured: float
    plain: float

    @property
    def speedup(self) -> float:
        """Over plain decoding, in turns with it."""
        return self.measured / self.plain

    def to_dict(self) -> dict[str, float]:
        """Plain values for JSON."""
        return {**asdict(self), "speedup": self.speedup}


def checked(trace: Trace, times: RoundTimes, policy: Policy, *, result: CellResult) -> Check:
    """What a run of `verifying` says about a prediction.

    Raises:
        ConfigurationError: the run failed.
    """
    if result.error is not None:
        raise ConfigurationError(f"the run of {policy.label} failed: {result.error}")
    size = int(str(result.names["batch_size"]))
    answer = ask(trace, policy, batch_size=size, times=times, grouped=True)
    measured = float(result.totals["tokens_per_second"])
    return Check(answer.tokens_per_second or 0.0, measured, float(result.totals["plain_tokens_per_second"] or measured))


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
    """A drafter as a models file has it."""
    found: dict[str, object] = {} if spec.name is None else {"type": spec.name}
    if spec.path is not None:
        found["path"] = _absolute(spec.path)
    if spec.parts:
        found["drafts"] = [_mapping(part) for part in spec.parts]
    return {**found, **({} if spec.k is None else {"k": spec.k}), **dict(spec.options)}


def _absolute(path: str) -> str:
    return str(resolved(Path(path))) if Path(path).exists() else path
