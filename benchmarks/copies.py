"""Files to be repeated with a name changed, and a target that does so: its weights are set here, not learned.

The demo target is too small to go on with a copy. `copier` makes a model of its shape, a whole Llama that takes as long
as it does, which writes what stood a number of tokens before, names changed. So lists of drafters can be measured on
the text of a copy with drafts that really stand or fall. What it says of models is nothing: they do not all copy as
faithfully.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path

import torch
from common import PAIR, ROOT
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

FILES = ("core/tree.py", "core/sampling.py", "draft/base.py", "draft/heads.py", "core/probs.py", "draft/ngram.py")
_LENGTH = 170  # tokens of a file
_BEGUN = 40  # tokens of its copy that are there already
_SHARP = 20.0  # length of keys and queries: attention then weighs the next token e^50 less than the right one
_SURE = 0.25  # of the head: a right token's logit is some 30 above the next, so that it copies at any temperature


@dataclass(frozen=True, slots=True)
class Copies:
    """prompts: each a file and the beginning of its copy; all copies stand ``lag`` tokens behind what they copy.

    renamed  token -> the token that stands for it in a copy, and the other way round
    """

    prompts: list[list[int]]
    lag: int
    renamed: dict[int, int]


def copies(count: int) -> Copies:
    """Of files of this repository. In each the most frequent name of one token is changed, in all copies."""
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    files = [tokenizer((ROOT / name).read_text()).input_ids[:_LENGTH] for name in FILES[:count]]
    texts = {token: tokenizer.decode([token]) or "?" for token in range(len(tokenizer))}
    names = {token for token, text in texts.items() if text[0] == " " and _is_name(text[1:])}
    unused = [token for token in sorted(names) if not any(token in file for file in files)]
    renamed: dict[int, int] = {}
    for file in files:
        old = Counter(token for token in file if token in names and token not in renamed).most_common(1)[0][0]
        new = next(token for token in unused if token not in renamed)
        renamed |= {old: new, new: old}
    between = tokenizer("\n\n\n").input_ids
    prompts = [[*file, *between, *(renamed.get(token, token) for token in file[:_BEGUN])] for file in files]
    return Copies(prompts, _LENGTH + len(between), renamed)


def _is_name(text: str) -> bool:
    return text.isidentifier() and not iskeyword(text) and len(text) > 3


def copier(spec: Copies, folder: Path) -> None:
    """Save a checkpoint of the demo target's shape that goes on with these copies.

    The first layer's heads look ``lag`` - 1 tokens back: a key is the same everywhere but for its rotation, and a
    query is a key turned back by so much. They carry a code of the token there, which the head knows. All other layers
    are random and add nothing: what they compute is multiplied by zeros.
    """
    config = AutoConfig.from_pretrained(PAIR / "target")
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    parts = model.state_dict()
    width, groups = config.head_dim, config.num_key_value_heads
    each = width - 1  # numbers of a code that a group of heads carries
    size, one = groups * each, groups * each * 2  # the code read, the code written, and a number that is always 1
    codes = torch.randint(0, 2, (config.vocab_size, size)) * 2.0 - 1.0
    for name, part in parts.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            part.zero_()
    embedding, head = parts["model.embed_tokens.weight"].zero_(), parts["lm_head.weight"].zero_()
    embedding[:, :size], embedding[:, one] = codes, 1.0
    head[:, size:one] = _SURE * codes[[spec.renamed.get(token, token) for token in range(config.vocab_size)]]
    norm = (config.hidden_size / (size + 1)) ** 0.5  # what the norm makes of every number of an embedding
    first = {name: parts[f"model.layers.0.self_attn.{name}_proj.weight"].zero_() for name in "qkvo"}
    key = torch.cat([torch.ones(width // 2), torch.zeros(width // 2)]) * _SHARP
    query = _turned(key, 1 - spec.lag, config.rope_parameters["rope_theta"])
    first["k"][:, one] = key.repeat(groups) / norm
    first["q"][:, one] = query.repeat(config.num_attention_heads) / norm
    heads = config.num_attention_heads // groups
    for group in range(groups):
        for number in range(each):
            place = group * each + number
            first["v"][group * width + number, place] = 1.0
            first["o"][size + place, group * heads * width + number] = 1.0 / norm
    model.to(torch.bfloat16).save_pretrained(folder)


def _turned(x: Tensor, positions: int, base: float) -> Tensor:
    """x [D] as rotary embedding turns it from a place to another one, ``positions`` further."""
    half = x.numel() // 2
    angles = positions * base ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[:half].double(), x[half:].double()
    return torch.cat([first * cos - second * sin, second * cos + first * sin]).float()
