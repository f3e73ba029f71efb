"""Train the target out of its loops, on text that it writes itself.

    python -m recipe.loops --work W --target <folder> --minutes 15

A model that has learned to copy copies what it has just written, without end. Where its greedy text goes round
for the third time, the next token of the round is made less likely (sequence-level unlikelihood: Welleck et al. 2020,
"Neural Text Generation with Unlikelihood Training"); batches of the corpus in between keep the rest as it was. A text
that comes a second time, as in rows of `modelling.repeated`, is no loop.
"""

import argparse
import copy
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from recipe.distil import PROMPT
from recipe.modelling import CONTEXT, END_ID, PAD_ID, Chunks, held_out_batches, load_model, save_model
from recipe.optim import cosine
from recipe.parallel import Shared, run_workers
from recipe.training import Pair, Progress, common_arguments, wait_while

LONGEST, SHORTEST = 96, 12  # tokens: the longest round, and how much must have come again before it is a loop


def looping(ids: torch.Tensor) -> torch.Tensor:
    """Mask [N, L] of the tokens of texts [N, L] that repeat a loop for the third time.

    One does when it and all before it, for as long as a round (and for `SHORTEST` tokens), stand one round earlier too.
    """
    places, found = torch.arange(ids.shape[1]), torch.zeros_like(ids, dtype=torch.bool)
    for period in range(1, min(LONGEST, ids.shape[1] - 1) + 1):
        differs = torch.ones_like(found)
        differs[:, period:] = ids[:, period:] != ids[:, :-period]
        last = torch.where(differs, places, -1).cummax(1).values
        found |= places - last > max(period, SHORTEST)
    return found


@torch.no_grad()
def write(model: LlamaForCausalLM, prompts: torch.Tensor, length: int) -> torch.Tensor:
    """The prompts [N, P], each with the model's greedy continuation: [N, length]."""
    writer = copy.deepcopy(model).to(torch.bfloat16).eval()
    writer.set_attn_implementation("sdpa")
    new = length - prompts.shape[1]
    ends = {"pad_token_id": PAD_ID, "eos_token_id": END_ID, "min_new_tokens": new, "max_new_tokens": new}
    return writer.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, **ends)


class OwnText:
    """Greedy texts of the target as it is now, a few batches at a time."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.prompts = Chunks(args.work / "train.bin", args.seed + 31 + rank)
        self.rows, self.length = args.own_rows, args.length
        self.ids = torch.empty(0, args.length, dtype=torch.long)

    def batch(self, model: LlamaForCausalLM, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Texts [rows, length], and which of their tokens loop."""
        if len(self.ids) < rows:
            prompts = self.prompts.batch(self.rows * self.length, self.length)[0][:, :PROMPT]
            with torch.compiler.set_stance("force_eager"):  # generation has a new shape at every step
                self.ids = write(model, prompts.to(model.device), self.length).cpu()
        ids, self.ids = self.ids[:rows], self.ids[rows:]
        found = looping(ids)
        found[:, :PROMPT] = False
        return ids, found


def unlikelihood(logits: torch.Tensor, ids: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """-log(1 - p) of the tokens that loop, a mean over all of the batch. Logits [N, L - 1, V] for texts [N, L]."""
    likely = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].exp()
    return -(torch.log1p(-likely.clamp(max=1 - 1e-6)) * found[:, 1:]).mean()


@torch.no_grad()
def check(pair: Pair, held_out: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    with torch.compiler.set_stance("force_eager"):
        losses = [pair.target_loss(ids.to(pair.device), labels.to(pair.device))[0].item() for ids, labels in held_out]
    return sum(losses) / len(losses)


def train_batch(pair: Pair, shared: Shared, own: OwnText, chunks: Chunks, args: argparse.Namespace, at: float) -> dict:
    """A batch of the target's own text and some of the corpus; `at` is how far the schedule is."""
    texts, found = (t.to(pair.device) for t in own.batch(pair.target.model, args.batch_tokens // args.length))
    with pair.precision():
        loops = unlikelihood(pair.target.logits(texts[:, :-1]), texts, found)
    (args.weight * loops / args.accumulate).backward()
    shared.add_target(texts.numel(), args.accumulate, cosine(at))
    for _ in range(args.corpus_batches):
        ids, labels = (t.to(pair.device) for t in chunks.batch(args.batch_tokens, CONTEXT))
        loss, _ = pair.target_loss(ids, labels)
        (loss / args.accumulate).backward()
        shared.add_target(args.batch_tokens, args.accumulate, cosine(at))
    return {"loss": loss.item(), "unlikelihood": loops.item(), "looping": found[:, PROMPT:].float().mean().item()}


def work(rank: int, pair: Pair, shared: Shared, progress: Progress, args: argparse.Namespace) -> None:
    """Run one worker; the first one also reports and saves."""
    torch.set_num_threads(args.threads)
    own, chunks = OwnText(args, rank), Chunks(args.work / "train.bin", args.seed + 7 + rank, args.repeats)
    held_out = held_out_batches(args)
    mean: dict[str, float] = {}
    reported = 0
    while progress.value < 1.0:
        wait_while(args.pause_file)
        values = train_batch(pair, shared, own, chunks, args, progress.value)
        progress.count(shared.steps, shared.tokens)
        mean = {name: 0.9 * mean.get(name, value) + 0.1 * value for name, value in values.items()}
        if rank == 0 and progress.step >= reported + args.check_every:
            progress.report(args.work / "log_loops.jsonl", **mean, held_out=check(pair, held_out))
            save_model(pair.target.model, args.work / "target_loops")
            reported = progress.step


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    pair, progress = Pair(args, load_model(args.target), load_model(args.draft)), Progress(args.steps, args.minutes)
    pair.draft.model.requires_grad_(False)
    shared = Shared(pair.target, pair.draft, args.workers)
    run_workers(work, args.workers, pair, shared, progress, args)
    save_model(pair.target.model, args.work / "target_loops")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser)
    parser.add_argument("--target", type=Path, required=True, help="its folder; the result goes to WORK/target_loops")
    parser.add_argument("--draft", type=Path, required=True, help="the folder of any draft of it; it learns nothing")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--accumulate", type=int, default=4, help="batches for one step")
    parser.add_argument("--length", type=int, default=256, help="of the texts that the target writes")
    parser.add_argument("--own-rows", type=int, default=32, help="texts it writes at a time")
    parser.add_argument("--corpus-batches", type=int, default=3, help="for each batch of its own text")
    parser.add_argument("--weight", type=float, default=1.0, help="of the unlikelihood")
    parser.add_argument("--repeats", type=float, default=0.1, help="share of rows in which a piece of text comes twice")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
