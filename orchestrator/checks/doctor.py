"""`paceline doctor`: facts about this machine and its Neuron SDK, without running anything on a chip; and whether a
drafter fits its target.

Every line is a fact, or why it could not be found; a machine without Neuron is not a failure. `paceline selftest`
checks what a chip computes.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from time import perf_counter

import torch

from paceline.checks.findings import Finding, Status
from paceline.checks.verify_subject import own_prompts
from paceline.config import SpeculativeConfig
from paceline.core.errors import PacelineError
from paceline.decoder import environment
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.native import build
from paceline.engine.fit import ENOUGH_TIMES
from paceline.generator import SpeculativeGenerator


def examine() -> list[Finding]:
    """Return all findings, in reading order. Whatever prevents a possible backend from running has failed."""
    from paceline.neuron import machine

    return [*_machine(), *_cache(), *(Finding(*one) for one in machine.examine())]


QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate into French: The train leaves at nine in the morning.",
    "List five things to pack for a week in the mountains.",
)
"""Prompts of `examine_draft` for a target with a tokenizer."""

_CALLS, _NEW = 16, 96


def examine_draft(target: CompiledDecoder, config: SpeculativeConfig, prompts: Sequence[Sequence[int]] = ()) -> Finding:
    """Draft greedily for some prompts (ids; default: outputs of the target), one at a time, and compare acceptance with
    what pays at the measured times. Raises what making the drafter raises.
    """
    began, plain = perf_counter(), SpeculativeGenerator(None, target, k=0)
    generator = SpeculativeGenerator(target=target, **dict(config))
    fit = generator.draft_fit
    if fit is None:
        return Finding("draft", "note", "it needs no weights, and its acceptance depends on the text alone")
    prompts = [list(one) for one in prompts] or own_prompts(plain, sampled=True, seed=0)
    for number in range(_CALLS):
        prompt = list(prompts[number % len(prompts)])
        room = min(_NEW, target.n_positions - len(prompt))
        for _ in range(ENOUGH_TIMES if number == 0 else 1):  # before the drafter may be judged
            plain.sample([prompt], max_new_tokens=room, eos_token_id=[])
            fit.plain(plain.statistics.verify_seconds / max(1, plain.statistics.num_rounds))
        generator.sample([prompt], max_new_tokens=room, eos_token_id=[])
        if fit.judged:
            break
    status: Status = "ok" if fit.fits else "note"
    seen = f"{fit}" if fit.fits else f"{fit.name} does not fit this target: {fit}; likely causes: {fit.causes}"
    return Finding("draft", status, seen, seconds=perf_counter() - began)


def _machine() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {os.cpu_count()} CPUs"
    yield Finding("machine", "ok", system)
    yield Finding("torch", "ok", torch.__version__)
    try:
        yield Finding("native", "ok", build.origin())
    except PacelineError as error:
        yield Finding("native", "FAILED", str(error))
    try:
        yield Finding("xla", "ok", f"torch_xla {metadata.version('torch-xla')}")
    except metadata.PackageNotFoundError:
        yield Finding("xla", "note", "torch_xla is not installed: backend 'xla' needs a separate environment")


def _cache() -> Iterator[Finding]:
    try:
        root = environment.cache_root()
    except PacelineError as error:
        yield Finding("cache", "FAILED", str(error))
        return
    above = next(folder for folder in (root, *root.parents) if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        yield Finding("cache", "FAILED", f"{root} cannot be written; set PACELINE_CACHE to a folder of yours")
        return
    free = shutil.disk_usage(above).free / 2**30
    built = sum(1 for _ in root.glob("*/*/manifest.json"))
    yield Finding("cache", "ok" if free > 5 else "note", f"{root}: {built} kernels and graphs, {free:.0f} GiB free")
