"""Distil the draft from the finished target, on corpus text and on text that the target wrote.

    python -m recipe.distil --work W --minutes 15

Starts from ``W/draft_along`` (what the draft learned along with the target) and writes ``W/draft``, every
now and then too; a run that was stopped continues with ``--start draft`` and fewer minutes.
The loss adds the total variation distance to the KL divergence: one minus that distance is the chance
that a sampled draft token is accepted.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from paceline.decoder.token_files import read_tokens
from recipe.modelling import CONTEXT, END_ID, PAD_ID, Chunks, held_out_batches, load_model, save_model
from recipe.optim import cosine
from recipe.parallel import Shared, run_workers
from recipe.training import Pair, Progress, common_arguments, wait_while

PROMPT = 64  # tokens of corpus text that the target goes on from


@torch.no_grad()
def own_text(model: LlamaForCausalLM, chunks: Chunks, rows: int, greedy: bool) -> torch.Tensor:
    """Rows of CONTEXT tokens, each a few prompts from the corpus with the target's continuations."""
    size, per_row = 256, CONTEXT // 256
    ids = chunks.batch(rows * CONTEXT, CONTEXT)[0].unflatten(1, (per_row, size))[..., :PROMPT].flatten(0, 1)
    how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    out = model.generate(
        ids.to(model.device),
        attention_mask=torch.ones_like(ids).to(model.device),
        max_new_tokens=size - PROMPT,
        min_new_tokens=size - PROMPT,
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
        **how,
    )
    return out.view(rows, CONTEXT).cpu()


class Mixture:
    """Batches of corpus text, every n-th of them of the target's own text."""

    def __init__(self, args: argparse.Namespace, rank: int, target: LlamaForCausalLM) -> None:
        self.chunks = Chunks(args.work / "train.bin", args.seed + 11 + rank, args.repeats)
        self.tokens, self.every, self.count = args.batch_tokens, args.own_every, 0
        self.own = torch.empty(0, CONTEXT, dtype=torch.long)
        if args.own_text:
            stream = read_tokens(args.own_text).astype(np.int64)
            self.own = torch.from_numpy(stream[: len(stream) // CONTEXT * CONTEXT]).view(-1, CONTEXT)
        else:
            self._write(args, target)
        self.own = self.own[torch.randperm(len(self.own))]

    def _write(self, args: argparse.Namespace, target: LlamaForCausalLM) -> None:
        attention = target.config._attn_implementation
        target.set_attn_implementation("sdpa")
        for number in range(args.own_batches):
            wait_while(args.pause_file)
            began = time.time()
            with torch.compiler.set_stance("force_eager"):  # generation has a new shape at every step
                text = own_text(target, self.chunks, args.own_rows, number % 2 == 0)
            self.own = torch.cat([self.own, text])
            print(
                f"own text: {self.own.numel()} tokens, {text.numel() / (time.time() - began):.0f}/s",
                flush=True,
            )
        target.set_attn_implementation(attention)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.count += 1
        if not len(self.own) or self.count % self.every:
            return self.chunks.batch(self.tokens, CONTEXT)
        rows = self.tokens // CONTEXT
        self.own = self.own.roll(rows, 0)
        ids = self.own[:rows]
        # The label after a row's last token is of no matter: only cross-entropy would use it.
        return ids, torch.cat([ids[:, 1:], ids[:, :1]], 1)


def work(rank: int, pair: Pair, shared: Shared, progress: Progress, args: argparse.Namespace) -> None:
    """Run one worker; the first one also reports and saves."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed + rank)
    held_out = held_out_batches(args)
    mixture = Mixture(args, rank, pair.target.model)
    log, mean, reported, checked = args.work / "log_distil.jsonl", {}, 0, 0
    while progress.value < 1.0:
        wait_while(args.pause_file)
        ids, labels = (t.to(pair.device) for t in mixture.batch())
        with torch.no_grad():
            logits = pair.target_loss(ids, labels)[1]
        loss, ce, kl, agree = pair.draft_loss(ids, labels, logits.clone())
        loss.backward()
        shared.step_draft(cosine(progress.value), ids.numel())
        progress.count(pair.draft.steps, shared.tokens)
        values = {"ce": ce.item(), "kl": kl.item(), "agree": agree.item()}
        mean = {name: 0.95 * mean.get(name, value) + 0.05 * value for name, value in values.items()}
        if rank:
            continue
        if progress.step >= reported + 20:
            progress.report(log, progress=progress.value, **mean)
            reported = progress.step
        if progress.step >= checked + args.check_every:
            progress.report(log, **pair.check(held_out))
            save_model(pair.draft.model, args.work / "draft")
            checked = progress.step


def distil(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    target = load_model(args.target or args.work / "target")
    pair = Pair(args, target, load_model(args.work / args.start))
    target.eval().requires_grad_(False)
    shared, progress = Shared(pair.target, pair.draft, args.workers), Progress(args.steps, args.minutes)
    run_workers(work, args.workers, pair, shared, progress, args)
    held_out = held_out_batches(args)
    progress.report(args.work / "log_distil.jsonl", **pair.check(held_out))
    save_model(pair.draft.model, args.work / "draft")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser)
    parser.add_argument("--target", type=Path, help="its folder, by default WORK/target")
    parser.add_argument("--start", default="draft_along", help="folder in WORK with the draft to start from")
    parser.add_argument("--own-text", type=Path, help="text of the target's that is there already, .bin")
    parser.add_argument("--own-batches", type=int, default=4, help="how often each worker has the target write text")
    parser.add_argument("--own-rows", type=int, default=32, help=f"rows of {CONTEXT} tokens each time")
    parser.add_argument("--own-every", type=int, default=5, help="every n-th batch is the target's text")
    parser.add_argument("--repeats", type=float, default=0.0, help="share of rows in which a piece of text comes twice")
    parser.set_defaults(kl_weight=1.0, tv_weight=0.5, check_every=100)
    args = parser.parse_args()
    args.lr = 0.0  # the target does not learn
    distil(args)


if __name__ == "__main__":
    main()
