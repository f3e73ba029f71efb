"""Training of DFlash heads (arXiv 2602.06036) on a frozen target.

A head learns from blocks at random anchors of a text: the block's tokens see the target's states before the anchor, and
each other (`paceline.heads.blocks`). Folders are written in z-lab's layout, which vLLM and SGLang read too.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.rope import rope_tables
from paceline.draft.dflash.config import DFlashConfig, DFlashHeadOptions, LayerRule
from paceline.heads import checkpoint
from paceline.heads.blocks import BlockNetwork, Supervision, seen, train
from paceline.heads.checkpoint import DraftVocab
from paceline.heads.features import TrainingData
from paceline.heads.frozen_model import FrozenTarget, Texts
from paceline.heads.layouts import write_json, written_sizes
from paceline.heads.options import BlockTraining, CachedTextOptions
from paceline.heads.trainable import TrainingKernels, initial, register
from paceline.heads.trainer import Progress, rank


def config_of(head: DFlashHeadOptions, sizes: ModelConfig, counts: Tensor, *, k: int) -> DFlashConfig:
    """Return the configuration of a head that drafts ``k`` tokens. ``counts`` [V]: of ids in the data"""
    head.check(sizes)
    spread = torch.linspace(1, max(1, sizes.num_layers - 2), 5).round().int().unique()
    return DFlashConfig(
        **DFlashConfig.of(sizes),
        draft_vocab_size=head.draft_vocab_size or sizes.vocab_size,
        layers=head.layers or tuple(spread.tolist()),
        rules=(LayerRule(),) * head.num_layers,
        block_size=k + 1,
        mask_token=int(counts.argmin()) if head.mask_token is None else head.mask_token,
    )


class TrainableDFlash(BlockNetwork):
    """A head in training. Its parameters have the names of a checkpoint's tensors; ``embedding`` [V, H] and, if it
    drafts all ids, ``output`` [V, H] are the target's and stay frozen.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DFlashConfig, embedding: Tensor, output: Tensor) -> None:
        super().__init__()
        self.config, self._kernels = config, TrainingKernels()
        for name, shape in config.shapes().items():
            register(self, name, initial(name, shape))
        cos, sin = rope_tables(config.rope, config.head_dim, config.max_position_embeddings)
        for name, value in (("cos", cos), ("sin", sin), ("embedding", embedding), ("output", output)):
            self.register_buffer(name, value, persistent=False)

    def blocks(self, texts: Texts, anchors: Tensor, k: int) -> Tensor:
        config, size, rows = self.config, texts.tokens.shape[1], k + 1
        states = self._norm(F.linear(texts.streams.float(), self._of("fc.weight")), "hidden_norm")
        first = texts.tokens.gather(1, anchors).unsqueeze(-1)
        tokens = F.pad(first, (0, k), value=config.mask_token).flatten(1)
        ahead = (anchors.unsqueeze(-1) + torch.arange(rows, device=anchors.device)).flatten(1)
        places = torch.cat([torch.arange(size, device=anchors.device).expand(len(anchors), -1), ahead], 1)
        x = F.embedding(tokens, self.get_buffer("embedding")).float()
        mask = seen(anchors, size, rows, last=-1, causal=False)
        for index in range(len(config.rules)):
            x = self._layer(f"layers.{index}.", x, states, places=places, mask=mask)
        hidden = self._norm(x, "norm").unflatten(1, (-1, rows))[:, :, 1:]
        own = config.draft_vocab_size != config.vocab_size
        return F.linear(hidden, self._of("lm_head.weight") if own else self.get_buffer("output"))

    def _layer(self, prefix: str, x: Tensor, states: Tensor, *, places: Tensor, mask: Tensor) -> Tensor:
        config, rotate = self.config, self._kernels.rotate
        y = self._norm(x, f"{prefix}input_layernorm")
        rotation = self.cos[places].unsqueeze(2), self.sin[places].unsqueeze(2)

        def heads(side: str, rows: Tensor) -> Tensor:
            made: Tensor = self._linear(f"{prefix}self_attn.{side}_proj", rows).unflatten(-1, (-1, config.head_dim))
            return made

        every, cos, sin = torch.cat([states, y], 1), *(part[:, states.shape[1] :] for part in rotation)
        q = rotate(self._norm(heads("q", y), f"{prefix}self_attn.q_norm"), (cos, sin))
        k = rotate(self._norm(heads("k", every), f"{prefix}self_attn.k_norm"), rotation)
        q, k, v = (part.transpose(1, 2) for part in (q, k, heads("v", every)))
        repeats = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        mixed = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask)
        x = x + self._linear(f"{prefix}self_attn.o_proj", mixed.transpose(1, 2).flatten(2))
        y = self._norm(x, f"{prefix}post_attention_layernorm")
        gate, up = (self._linear(f"{prefix}mlp.{name}_proj", y) for name in ("gate", "up"))
        return x + self._linear(f"{prefix}mlp.down_proj", F.silu(gate) * up)

    def _of(self, name: str) -> Tensor:
        return self.get_parameter(name)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        biases = self.config.mlp_bias if ".mlp." in name else self.config.attention_bias
        return F.linear(x, self._of(f"{name}.weight"), self._of(f"{name}.bias") if biases else None)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self._kernels.norm(x.float(), self._of(f"{name}.weight"), eps=self.config.rms_norm_eps)


@torch.no_grad()
def fresh(config: DFlashConfig, target: FrozenTarget, vocabulary: DraftVocab, *, depth: int) -> TrainableDFlash:
    """Create a head that starts from the target's last layers and norm, where they fit."""
    torch.manual_seed(0)
    network = TrainableDFlash(config, target.embedding, target.output.detach())
    if config.draft_vocab_size != config.vocab_size:
        register(network, "lm_head.weight", target.output.detach()[vocabulary.ids.to(target.device)].clone())
    state = network.state_dict()
    weights: dict[str, Tensor] = {"norm.weight": target.norm}
    count, size = len(config.rules), config.hidden_size
    fused = torch.zeros_like(state["fc.weight"])
    fused[:, -size:] = torch.eye(size)
    weights["fc.weight"] = fused
    for index in range(count):
        weights |= {f"layers.{index}.{name}": x for name, x in target.block(max(0, depth - count + index)).items()}
    fitting = {name: x for name, x in weights.items() if name in state and x.shape == state[name].shape}
    network.load_state_dict({**state, **fitting})
    return network.to(target.device)


def written(config: DFlashConfig, depth: int) -> dict[str, Any]:
    """Return the config.json of a head for a target of ``depth`` layers, in z-lab's layout."""
    return {
        **written_sizes(config, num_layers=len(config.rules), qk_norm=True),
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "num_target_layers": depth,
        "draft_vocab_size": config.draft_vocab_size,
        "dflash_config": {
            "mask_token_id": config.mask_token,
            "target_layer_ids": [layer - 1 for layer in config.layers],  # whose outputs are read
        },
    }


def train_dflash(
    target: Path,
    data: TrainingData,
    head: DFlashHeadOptions,
    *,
    texts: CachedTextOptions,
    options: BlockTraining,
    work: Path,
    out: Path,
    report: Progress,
) -> list[float] | None:
    """Train a head and write it to ``out`` in bfloat16, with acceptance.json; None if the time limit ended the run.
    Returns the share of blocks whose drafts 1, 2, ... are all right.
    """
    sizes = ModelConfig.from_pretrained(target)
    counts = data.counts(sizes.vocab_size)
    config = config_of(head, sizes, counts, k=options.k)
    texts.check_room(sizes.max_position_embeddings, options.k)
    frozen = FrozenTarget(target, config.layers, precision=options.precision, device=options.device)
    vocabulary = DraftVocab.frequent(counts, config.draft_vocab_size)
    network = fresh(config, frozen, vocabulary, depth=sizes.num_layers)
    given = Supervision(frozen.output.detach(), vocabulary.to(options.device))
    corpus = data.corpus(frozen, texts, folder=work / "states")
    key = {name: str(value) for name, value in asdict(config).items()}
    shares = train(network, corpus, options, given=given, folder=work, key=key, skip=data.skip(texts), report=report)
    if shares is not None and not rank():
        write(out, network, vocabulary, depth=sizes.num_layers, shares=shares)
    return shares


def write(out: Path, network: TrainableDFlash, vocabulary: DraftVocab, *, depth: int, shares: list[float]) -> None:
    weights = {name: x.detach().to("cpu", torch.bfloat16) for name, x in network.state_dict().items()}
    if "lm_head.weight" in weights:
        weights |= {"d2t": vocabulary.offsets.cpu(), "t2d": vocabulary.mask.cpu()}
    checkpoint.write(out / "model.safetensors", weights, written(network.config, depth))
    write_json(out / "acceptance.json", {"greedy chains": [round(share, 4) for share in shares]})
