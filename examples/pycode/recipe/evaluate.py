"""Measure a pair on held-out text: losses, agreement, accepted draft tokens, loops in greedy text.

    python -m recipe.evaluate --work W --target <folder> --draft <folder> --out result.json

Two pairs evaluated with the same seed see the same windows and the same prompts.
"""

import argparse
import itertools
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from recipe.corpus import HELD_OUT_PACKAGES, HELD_OUT_STDLIB
from recipe.modelling import CONTEXT, Chunks
from recipe.training import cross_entropy


def files_by_source(held_out: dict[str, str], sources: list[str]) -> dict[str, list[str]]:
    """Names of held-out files for each source that has any."""
    files = {s: sorted(n for n in held_out if n == s or n.startswith(s + "/")) for s in sources}
    return {s: names for s, names in files.items() if names}


def cut_prompts(
    held_out: dict[str, str],
    sources: list[str],
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    seed: int,
    sizes: tuple[int, int] = (64, 128),
) -> list[str]:
    """Prompts that begin at a definition and end with a line's text (before its newline)."""
    rng, files = random.Random(seed), files_by_source(held_out, sources)
    prompts: list[str] = []
    order: list[str] = []
    while len(prompts) < count:
        if not order:
            order = rng.sample(sorted(files), len(files))
        lines = held_out[rng.choice(files[order[-1]])].split("\n")
        starts = [i for i, line in enumerate(lines) if re.match(r" {0,4}(@|def |class |async def )", line)]
        if not starts:
            continue
        start, wanted = rng.choice(starts), rng.randint(*sizes)
        for end in range(start + 1, len(lines) + 1):
            prompt = "\n".join(lines[start:end])
            size = len(tokenizer(prompt).input_ids)
            if size >= wanted:
                break
        if wanted <= size <= sizes[1] and lines[end - 1].strip() and prompt not in prompts:
            prompts.append(prompt)
            order.pop()
    return prompts


@torch.no_grad()
def complete(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: list[str], length: int, greedy: bool
) -> list[list[int]]:
    """Lists of generated ids, cut at the end of the text."""
    how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    generated = []
    for at in range(0, len(prompts), 10):
        inputs = tokenizer(
            prompts[at : at + 10],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            return_token_type_ids=False,
        )
        out = model.generate(**inputs, max_new_tokens=length, **how)
        for ids in out[:, inputs.input_ids.shape[1] :].tolist():
            end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
            generated.append(ids[:end])
    return generated


def ends_in_cycle(ids: list[int], longest: int = 16, repeats: int = 3) -> bool:
    """Whether the text's tail is one short run of tokens, at least `repeats` times."""
    tail = ids[-longest * repeats :]
    return len(tail) == longest * repeats and any(tail[p:] == tail[:-p] for p in range(1, longest + 1))


def is_repetitive(ids: list[int], tail: int = 64) -> bool:
    """Whether fewer than half of the 4-grams in the last tokens are distinct."""
    last = ids[-tail:]
    grams = [tuple(last[i : i + 4]) for i in range(len(last) - 3)]
    return len(set(grams)) < len(grams) / 2


def accepted_length(agreements: list[list[bool]], k: int) -> float:
    """Mean number of accepted draft tokens per target pass, for greedy chains of k tokens."""
    accepted = rounds = 0
    for agree in agreements:
        at = 0
        while at < len(agree):
            run = 0
            while run < k and at + run < len(agree) and agree[at + run]:
                run += 1
            accepted, rounds, at = accepted + run, rounds + 1, at + run + 1
    return accepted / max(1, rounds)


class Evaluation:
    """A pair, and what is measured with it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer = AutoTokenizer.from_pretrained(args.target)
        self.held_out = json.loads((args.work / "held_out.json").read_text())
        self.target, self.draft = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for folder in (args.target, args.draft)
        )

    @torch.no_grad()
    def on_held_out_text(self) -> dict:
        """Loss of both models and their agreement on windows of held-out files."""
        chunks = Chunks(self.args.work / "held_out.bin", self.args.seed + 1)
        sums, near, rounds = np.zeros(4), torch.zeros(CONTEXT), self.args.windows // 4
        for _ in range(rounds):
            ids, labels = chunks.batch(4 * CONTEXT, CONTEXT)
            p, q = self.target(ids).logits, self.draft(ids).logits
            overlap = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).mean().item()
            agree = (p.argmax(-1) == q.argmax(-1)).float().mean().item()
            sums += [cross_entropy(p, labels).item(), cross_entropy(q, labels).item(), overlap, agree]
            near -= p.log_softmax(-1).gather(-1, labels[..., None])[..., 0].mean(0)
        record = json.loads((self.args.work / "sources.json").read_text())
        bytes_per_token = record["bytes"]["held_out"] / record["tokens"]["held_out"]
        result: dict = {}
        for name, nll in zip(("target", "draft"), sums[:2] / rounds, strict=True):
            bits = nll / math.log(2) / bytes_per_token
            parameters = sum(p.numel() for p in getattr(self, name).parameters())
            result[name] = {
                "nll": nll,
                "perplexity": math.exp(nll),
                "bits_per_byte": bits,
                "parameters": parameters,
            }
        edges = (16, 64, 256, 512, 1024)
        result["target"]["nll_by_position"] = {
            f"{a}-{b}": float(near[a:b].mean()) / rounds for a, b in itertools.pairwise(edges)
        }
        tokens = rounds * 4 * CONTEXT
        result["held_out_text"] = {
            "tokens": tokens,
            "overlap": sums[2] / rounds,
            "agreement": sums[3] / rounds,
        }
        return result

    @torch.no_grad()
    def on_repeated_text(self, length: int = 128) -> dict:
        """Share of held-out tokens that are the target's best, in text that stands twice: the first and second time."""
        chunks, right = Chunks(self.args.work / "held_out.bin", self.args.seed + 5), torch.zeros(2)
        for _ in range(20):
            text = chunks.batch(CONTEXT, CONTEXT)[0].view(-1, length)
            twice = torch.cat([text, text], 1)
            found = self.target(twice[:, :-1]).logits.argmax(-1) == twice[:, 1:]
            right += torch.stack([found[:, : length - 1].float().mean(), found[:, length - 1 :].float().mean()])
        return {"repeated_text": dict(zip(("first", "second"), (right / 20).tolist(), strict=True))}

    @torch.no_grad()
    def compare(self, prompts: list[str], continuations: list[list[int]]) -> tuple[list[list[bool]], float]:
        """Per continuation: does the draft's best token agree with the target's; sum of min(p, q)."""
        agreements, overlaps = [], []
        for prompt, ids in zip(prompts, continuations, strict=True):
            head = self.tokenizer(prompt).input_ids
            text = torch.tensor([head + ids])
            p, q = (m(text).logits[0, len(head) - 1 : -1].softmax(-1) for m in (self.target, self.draft))
            agreements.append((p.argmax(-1) == q.argmax(-1)).tolist())
            overlaps += torch.minimum(p, q).sum(-1).tolist()
        return agreements, float(np.mean(overlaps))

    def on_own_text(self) -> dict:
        """Agreement and loops in what the target writes after held-out prompts."""
        args, result = self.args, {}
        prompts = cut_prompts(
            self.held_out, HELD_OUT_STDLIB + HELD_OUT_PACKAGES, self.tokenizer, args.prompts, args.seed
        )
        texts = {}
        for name in "greedy", "sampled":
            texts[name] = complete(self.target, self.tokenizer, prompts, args.length, name == "greedy")
            agreements, overlap = self.compare(prompts, texts[name])
            flat = [a for row in agreements for a in row]
            cycles = [ends_in_cycle(ids) for ids in texts[name]]
            result[name] = {
                "prompts": len(prompts),
                "tokens": len(flat),
                "agreement": float(np.mean(flat)),
                "overlap": overlap,
                "ends_in_cycle": float(np.mean(cycles)),
                "repetitive": float(np.mean([is_repetitive(ids) for ids in texts[name]])),
                "id_0": float(np.mean([i == 0 for ids in texts[name] for i in ids])),
                "accepted_length": {k: accepted_length(agreements, k) for k in range(1, 9)},
            }
            free = [a for a, cycle in zip(agreements, cycles, strict=True) if not cycle]
            result[name]["accepted_length_without_cycles"] = {k: accepted_length(free, k) for k in range(1, 9)}
        decode = self.tokenizer.decode
        result["samples"] = [
            {"prompt": p, "greedy": decode(g), "sampled": decode(s)}
            for p, g, s in zip(prompts, texts["greedy"], texts["sampled"], strict=True)
        ]
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder with the corpus")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="file for the result")
    parser.add_argument("--windows", type=int, default=64, help="held-out windows, for loss and agreement")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--length", type=int, default=128, help="new tokens for each prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    evaluation = Evaluation(args)
    result = {
        **evaluation.on_held_out_text(),
        **evaluation.on_repeated_text(),
        **evaluation.on_own_text(),
    }
    args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps({k: v for k, v in result.items() if k != "samples"}, indent=1))


if __name__ == "__main__":
    main()
