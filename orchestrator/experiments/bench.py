"""Tokens per second of a target and a draft in every mode, compared with Hugging Face's `generate` in one run.

Modes take turns on every prompt, so that a noisy machine slows them all; each figure is the median of the repeats
(of one run for Hugging Face, whose runs take several times as long).
Making graphs and warming up are not measured. Not a test: nothing here passes or fails.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from paceline.auto import AutoDecoder, SamplingDecoder
from paceline.generator import Sampler, SpeculativeGenerator
from paceline.heads.frozen_model import transformers_model
from paceline.outputs import GenerationResult, Statistics
from paceline.text.tokenizer import load_tokenizer, prompt_ids

Run = Callable[[list[int]], "Outcome"]


@dataclass(slots=True)
class Outcome:
    """New tokens of one prompt in one mode, and what it took."""

    tokens: list[int]
    statistics: Statistics | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class Mode:
    """A way to decode, and what was seen of it: for every prompt one outcome per repeat."""

    name: str
    run: Run
    seen: list[list[Outcome]] = field(default_factory=list)

    def tokens_per_second(self) -> float:
        """New tokens of all prompts over the sum of their median times."""
        times = [statistics.median(outcome.seconds for outcome in repeats) for repeats in self.seen]
        return sum(len(repeats[0].tokens) for repeats in self.seen) / sum(times)

    def decode_tokens_per_second(self) -> float | None:
        """The same without the time that prompts took; None where that is not known."""
        if not all(outcome.statistics for repeats in self.seen for outcome in repeats):
            return None
        times = [
            statistics.median(o.seconds - o.statistics.prefill_seconds for o in repeats if o.statistics)
            for repeats in self.seen
        ]
        return sum(len(repeats[0].tokens) for repeats in self.seen) / sum(times)

    def part(self, rows: Sequence[int]) -> Mode:
        """The same, of some of the prompts."""
        return Mode(self.name, self.run, [self.seen[row] for row in rows])

    def summary(self) -> dict[str, object]:
        """Plain values for JSON. A round's time is that of drafting and verifying, without the loop around it."""
        figures: dict[str, object] = {"tokens_per_second": round(self.tokens_per_second(), 2)}
        if (decoding := self.decode_tokens_per_second()) is not None:
            figures["decode_tokens_per_second"] = round(decoding, 2)
        counted = [[s for outcome in repeats if (s := outcome.statistics)] for repeats in self.seen]
        firsts = [repeats[0] for repeats in counted if repeats]
        rounds = sum(s.num_rounds for s in firsts)
        if rounds:
            drafts = sum(s.num_drafts for s in firsts)
            figures["tau"] = round(1 + sum(s.num_accepted_tokens for s in firsts) / drafts, 3) if drafts else 1.0
            figures["acceptance_by_position"] = _by_position(firsts)
            times = [
                (s.draft_seconds + s.verify_seconds) / s.num_rounds
                for repeats in counted
                for s in repeats
                if s.num_rounds
            ]
            figures["ms_per_round"] = round(1e3 * statistics.median(times), 3)
        return figures

    def beside(self, other: Mode) -> dict[str, object]:
        """How this mode compares with another one on the same prompts."""
        pairs = zip(self.seen, other.seen, strict=True)
        figures: dict[str, object] = {
            "over_" + other.name: round(self.tokens_per_second() / other.tokens_per_second(), 3)
        }
        ours, theirs = self.decode_tokens_per_second(), other.decode_tokens_per_second()
        if ours and theirs:
            figures["decode_over_" + other.name] = round(ours / theirs, 3)
        return {**figures, "texts_unlike_" + other.name: sum(a[0].tokens != b[0].tokens for a, b in pairs)}


def bench_pair(
    target: Path,
    draft: Path,
    prompts: Sequence[str],
    *,
    k: Sequence[int] = (2, 4, 6),
    max_new_tokens: int = 128,
    repeats: int = 3,
    load: Callable[..., SamplingDecoder] = AutoDecoder.from_pretrained,
) -> dict[str, object]:
    """Measure plain, speculative (every k), n-gram and Hugging Face decoding, greedy, one prompt at a time.

    ``load`` loads both models; positions and prefill graphs are made to fit the prompts. Plain decoding runs several
    steps in a graph, which is faster than one by one; its time per round is that of one step.

    Returns a JSON-ready dictionary: ``modes`` by name, ``best_k``, ratios, and whether all our modes gave the same
    tokens (``identical``).
    """
    tokenizer = load_tokenizer(target)
    ids = [prompt_ids(tokenizer, prompt, f"prompt {index}") for index, prompt in enumerate(prompts, start=1)]
    positions = max(len(row) for row in ids) + max_new_tokens
    longest = max(map(len, ids))
    big, small = (load(path, n_positions=positions, context_length_estimate=longest) for path in (target, draft))
    plain = SpeculativeGenerator(None, big)
    ngram = SpeculativeGenerator("ngram", big, k=max(k))
    pairs = {n: SpeculativeGenerator(small, big, k=n) for n in k}
    for generator in (plain, ngram, *pairs.values()):
        generator.compile()
    modes = [Mode("plain", generator_run(plain, max_new_tokens)), Mode("ngram", generator_run(ngram, max_new_tokens))]
    modes += [Mode(f"speculative k={n}", generator_run(generator, max_new_tokens)) for n, generator in pairs.items()]
    theirs = _hugging_face(str(target), str(draft), max_new_tokens)
    take_turns(modes, ids, repeats, once=theirs)
    return _report(modes, theirs, list(k))


def take_turns(modes: list[Mode], rows: list[list[int]], repeats: int, *, once: Sequence[Mode] = ()) -> None:
    """Run every prompt in every mode, ``repeats`` times; after a first run of each that does not count.

    ``once``: modes that take so long that one run of a prompt must do.
    """
    for mode in [*modes, *once]:
        mode.run(rows[0])
    for row in rows:
        for mode in [*modes, *once]:
            mode.seen.append([])
        for turn in range(repeats):
            for mode in modes if turn else [*modes, *once]:
                mode.seen[-1].append(_timed(mode.run, row))


def _report(ours: list[Mode], theirs: list[Mode], k: list[int]) -> dict[str, object]:
    speeds = {mode.name: mode.tokens_per_second() for mode in [*ours, *theirs]}
    best = max(k, key=lambda n: speeds[f"speculative k={n}"])
    fastest = speeds[f"speculative k={best}"]
    texts = [[repeats[0].tokens for repeats in mode.seen] for mode in ours]
    assisted = max(speed for name, speed in speeds.items() if name.startswith("transformers assisted"))
    generate = max(speed for name, speed in speeds.items() if name.startswith("transformers generate"))
    return {
        "modes": {mode.name: mode.summary() for mode in [*ours, *theirs]},
        "best_k": best,
        "speculative_over_plain": round(fastest / speeds["plain"], 3),
        "speculative_over_transformers_assisted": round(fastest / assisted, 3),
        "plain_over_transformers_generate": round(speeds["plain"] / generate, 3),
        "identical": all(text == texts[0] for text in texts),
        "prompts": len(texts[0]),
    }


def generator_run(generator: Sampler, max_new_tokens: int, **sampling: Any) -> Run:
    """Return a function that generates a number of tokens with a generator or a target. ``sampling``: fields of
    `SamplingParams`.
    """

    def run(row: list[int]) -> Outcome:
        result = generator.sample([row], max_new_tokens=max_new_tokens, return_dict=True, **sampling)
        assert isinstance(result, GenerationResult)
        return Outcome(result.sequences[0, len(row) : result.lengths[0]].tolist(), result.statistics)

    return run


def _hugging_face(target: str, draft: str, max_new_tokens: int) -> list[Mode]:
    """`generate` alone and with an assistant, in both number formats: which is faster depends on the machine."""
    modes = []
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        big, small = (transformers_model(path, dtype) for path in (target, draft))
        for model in (big, small):
            if not model.generation_config.eos_token_id:  # an empty list of ids, which `generate` cannot take
                model.generation_config.eos_token_id = None
        modes.append(Mode(f"transformers generate {name}", _theirs(big, None, max_new_tokens)))
        modes.append(Mode(f"transformers assisted {name}", _theirs(big, small, max_new_tokens)))
    return modes


def _theirs(model: PreTrainedModel, assistant: PreTrainedModel | None, max_new_tokens: int) -> Run:
    def run(row: list[int]) -> Outcome:
        ids = torch.tensor([row])
        with torch.no_grad():
            out = model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=assistant,
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
        return Outcome(out[0, len(row) :].tolist())

    return run


def _timed(run: Run, row: list[int]) -> Outcome:
    begin = perf_counter()
    outcome = run(row)
    outcome.seconds = perf_counter() - begin
    return outcome


def _by_position(counted: list[Statistics]) -> list[float]:
    """Return for each position the acceptance rate over the rounds that proposed a token there."""
    places = max(len(s.num_draft_tokens_per_pos) for s in counted)
    figures = []
    for place in range(places):
        drafted = sum(s.num_draft_tokens_per_pos[place] for s in counted if place < len(s.num_draft_tokens_per_pos))
        accepted = sum(
            s.num_accepted_tokens_per_pos[place] for s in counted if place < len(s.num_accepted_tokens_per_pos)
        )
        figures.append(round(accepted / drafted, 3) if drafted else 0.0)
    return figures
