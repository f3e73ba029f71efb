"""Train the target; the draft learns from the target's logits on the same batches.

    python -m recipe.training --work W --target <folder or shape> --draft <folder or shape> --minutes 60

A folder is a warm start, a shape `hidden,layers,heads,kv_heads,intermediate` a fresh model. A draft folder
with `--draft-hidden` is cut down to that width. The run can be stopped and resumed (`--resume`), and
sleeps while the file `--pause-file` exists. Weights are float32; `--bf16` has matrices multiplied in bfloat16, more
than twice as fast on a GPU or on a CPU with instructions for it (avx512_bf16, AMX), slower on others. With
`--workers 2 --threads 1` (and OMP_NUM_THREADS=1) a busy core slows only its own worker down.
"""

import argparse
import contextlib
import math
import time
from pathlib import Path

import torch
import torch._inductor.config
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from recipe.modelling import (
    CONTEXT,
    Chunks,
    append_json,
    held_out_batches,
    load_model,
    narrow,
    new_model,
    parse_shape,
    save_model,
)
from recipe.optim import Trainee, cosine
from recipe.parallel import Shared, run_workers

Losses = tuple[torch.Tensor, ...]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Pair:
    """Target and draft in training, and the functions that give their losses."""

    def __init__(self, args: argparse.Namespace, target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        attention = "sdpa" if self.device.type == "cuda" else "blocked_causal"
        for model in target, draft:
            model.to(self.device).train()
            model.set_attn_implementation(attention)
        self.dtype = torch.bfloat16 if args.bf16 else torch.float32
        self.target = Trainee(target, args.lr, args.warmup, self.dtype)
        self.draft = Trainee(draft, args.draft_lr, args.warmup, self.dtype)
        self.kl_weight, self.tv_weight = args.kl_weight, args.tv_weight
        self.distance, self.cross_entropy = self._distance, cross_entropy
        if args.compile:
            torch._inductor.config.cpp.threads = args.threads
            for layer in [*target.model.layers, *draft.model.layers]:
                layer.compile(dynamic=False)
            self.distance = torch.compile(self._distance, dynamic=False)
            self.cross_entropy = torch.compile(cross_entropy, dynamic=False)

    def precision(self) -> contextlib.AbstractContextManager:
        if self.dtype == torch.bfloat16:
            return torch.autocast(self.device.type, self.dtype)
        return contextlib.nullcontext()

    def target_loss(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and logits of the target."""
        with self.precision():
            logits = self.target.logits(ids)
        return self.cross_entropy(logits, labels), logits

    def draft_loss(self, ids: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor) -> Losses:
        """Loss of the draft; its cross-entropy, divergence from the target and agreement with it."""
        with self.precision():
            logits = self.draft.logits(ids)
        return self.distance(logits, labels, teacher)

    def _distance(self, logits: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor) -> Losses:
        q, p = logits.float().log_softmax(-1), teacher.float().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1).mean()
        ce = F.nll_loss(q.flatten(0, 1), labels.flatten())
        agree = (q.argmax(-1) == p.argmax(-1)).float().mean()
        loss = self.kl_weight * kl + (1 - self.kl_weight) * ce
        if self.tv_weight:
            loss = loss + self.tv_weight * (1 - torch.minimum(p.exp(), q.exp()).sum(-1).mean())
        return loss, ce.detach(), kl.detach(), agree

    @torch.no_grad()
    def check(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
        sums = torch.zeros(4)
        with torch.compiler.set_stance("force_eager"):
            for ids, labels in batches:
                ids, labels = ids.to(self.device), labels.to(self.device)
                loss, logits = self.target_loss(ids, labels)
                sums += torch.stack([loss, *self.draft_loss(ids, labels, logits)[1:]]).cpu()
        names = ("held_out", "draft_held_out", "draft_kl", "agreement")
        return dict(zip(names, (sums / len(batches)).tolist(), strict=True))


def build(spec: str) -> LlamaForCausalLM:
    return load_model(Path(spec)) if Path(spec).is_dir() else new_model(*parse_shape(spec))


def build_draft(args: argparse.Namespace) -> LlamaForCausalLM:
    model = build(args.draft)
    if args.draft_hidden:
        model = narrow(model, args.draft_hidden, Chunks(args.work / "train.bin", 7).batch(8192, 512)[0])
    return model


def wait_while(pause_file: Path | None) -> None:
    while pause_file is not None and pause_file.exists():
        time.sleep(1)


class Progress:
    """How far a schedule is, by steps or by the clock, whichever is further."""

    def __init__(self, steps: int, minutes: float) -> None:
        self.steps, self.minutes, self.seconds, self.step, self.tokens = steps, minutes, 0.0, 0, 0
        self.began = time.time()

    def restore(self, saved: dict) -> None:
        self.step, self.tokens, self.seconds = saved["step"], saved["tokens"], saved["seconds"]
        self.began = time.time() - self.seconds

    def count(self, step: int, tokens: int) -> None:
        self.step, self.tokens, self.seconds = step, tokens, time.time() - self.began

    def report(self, log: Path, **values: float) -> None:
        rounded = {name: round(value, 4) for name, value in values.items()}
        append_json(log, {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds), **rounded})

    @property
    def value(self) -> float:
        """0 at the start, 1 at the end."""
        return min(1.0, max(self.step / self.steps, (time.time() - self.began) / 60 / self.minutes))

    def state(self) -> dict:
        return {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}


def train_batch(pair: Pair, shared: Shared, chunks: Chunks, args: argparse.Namespace, at: float) -> dict:
    """One batch for the draft and for the target; `at` is how far the schedule is."""
    length = CONTEXT if at >= args.long_from else args.length
    ids, labels = (t.to(pair.device) for t in chunks.batch(args.batch_tokens, length))
    loss, logits = pair.target_loss(ids, labels)
    (loss / args.accumulate).backward()
    values = {"loss": loss.item()}
    if at >= args.draft_from:
        draft_loss, _, kl, agree = pair.draft_loss(ids, labels, logits.detach())
        draft_loss.backward()
        shared.step_draft(1.0)
        values.update(kl=kl.item(), agree=agree.item())
    shared.add_target(args.batch_tokens, args.accumulate, cosine(at))
    return values


def save_state(pair: Pair, shared: Shared, progress: Progress, path: Path) -> None:
    """Write a checkpoint; it replaces the last one only when it is whole."""
    part = path.with_suffix(".part")
    with shared.lock:
        pair.target.steps, pair.draft.steps = int(shared.counts[0]), int(shared.counts[3])
        states = {"target": pair.target.state(), "draft": pair.draft.state()}
        torch.save({**states, "progress": progress.state()}, part)
    Path(part).replace(path)


def work(rank: int, pair: Pair, shared: Shared, progress: Progress, args: argparse.Namespace) -> None:
    """Run one worker; the first one also reports and saves."""
    torch.set_num_threads(args.threads)
    chunks = Chunks(args.work / "train.bin", args.seed + 1000 * rank + shared.steps, args.repeats)
    held_out = held_out_batches(args)
    mean: dict[str, float] = {}
    reported = checked = progress.step
    last_save = time.time()
    while progress.value < 1.0:
        wait_while(args.pause_file)
        values = train_batch(pair, shared, chunks, args, progress.value)
        progress.count(shared.steps, shared.tokens)
        if rank:
            continue
        mean = {name: 0.95 * mean.get(name, value) + 0.05 * value for name, value in values.items()}
        if progress.step >= reported + 5:
            progress.report(args.work / "log.jsonl", progress=progress.value, **mean)
            reported = progress.step
        if progress.step >= checked + args.check_every:
            progress.report(args.work / "log.jsonl", **pair.check(held_out))
            checked = progress.step
        if time.time() - last_save > args.save_seconds:
            save_state(pair, shared, progress, args.work / "state.pt")
            last_save = time.time()


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    held_out = held_out_batches(args)
    pair, progress = Pair(args, build(args.target), build_draft(args)), Progress(args.steps, args.minutes)
    for name, trainee in ("target", pair.target), ("draft", pair.draft):
        print(name, sum(p.numel() for p in trainee.model.parameters()), "parameters", flush=True)
    if args.resume:
        saved = torch.load(args.work / "state.pt", weights_only=True, map_location=pair.device)
        pair.target.restore(saved["target"])
        pair.draft.restore(saved["draft"])
        progress.restore(saved["progress"])
    shared = Shared(pair.target, pair.draft, args.workers)
    shared.counts[1] = progress.tokens
    run_workers(work, args.workers, pair, shared, progress, args)
    progress.report(args.work / "log.jsonl", **pair.check(held_out))
    save_state(pair, shared, progress, args.work / "state.pt")
    save_model(pair.target.model, args.work / "target")
    save_model(pair.draft.model, args.work / "draft_along")


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of both training commands."""
    parser.add_argument("--work", type=Path, required=True, help="folder with the corpus; results go there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="of each worker")
    parser.add_argument("--workers", type=int, default=1, help="processes that train together (CPU only)")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of one forward pass")
    parser.add_argument("--warmup", type=int, default=20, help="steps")
    parser.add_argument("--kl-weight", type=float, default=0.8, help="the rest is the draft's cross-entropy")
    parser.add_argument("--tv-weight", type=float, default=0.0, help="of the total variation distance")
    parser.add_argument("--draft-lr", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end the schedule by then")
    parser.add_argument("--check-every", type=int, default=25)
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--pause-file", type=Path)
    parser.add_argument("--bf16", action="store_true", help="multiply matrices in bfloat16")
    parser.add_argument("--no-compile", dest="compile", action="store_false")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser)
    parser.add_argument("--target", default="384,8,8,4,1024", help="folder or shape")
    parser.add_argument("--draft", default="160,2,4,2,512", help="folder or shape")
    parser.add_argument("--draft-hidden", type=int, help="cut the draft of a folder down to this width")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--accumulate", type=int, default=2, help="batches for one step of the target")
    parser.add_argument("--length", type=int, default=512, help="of sequences, before --long-from")
    parser.add_argument("--long-from", type=float, default=0.8, help=f"progress from which it is {CONTEXT}")
    parser.add_argument("--repeats", type=float, default=0.0, help="share of rows in which a piece of text comes twice")
    parser.add_argument("--draft-from", type=float, default=0.0, help="progress from which the draft learns")
    parser.add_argument("--save-seconds", type=float, default=180)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
