"""What a training begins with: a trained head, or a fresh one with the target's last layer, norms and output layer.

A fresh head has little data; what the target knows already need not be learned. Not a part of the papers, which begin
with random layers. What does not fit (another width, other heads) stays random.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.decoder.models.config import ModelConfig
from paceline.eagle.checkpoint import Checkpoint
from paceline.eagle.config import EagleConfig
from paceline.eagle.network import TrainableHead
from paceline.eagle.objective import DraftVocab
from paceline.training.frozen_model import FrozenTarget

_FC = 0.5  # of the identity in the fc of version 1: it mixes a token and a feature


def default_config(target: ModelConfig, *, version: int, layers: tuple[int, ...], draft_vocab_size: int) -> EagleConfig:
    """A head of the target's own sizes."""
    longest = target.rope.longest or target.max_position_embeddings
    return EagleConfig(
        version=version,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=min(target.max_position_embeddings, longest),
        rope=target.rope,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size if version == 3 else target.vocab_size,
        target_hidden_size=target.hidden_size,
        attention_bias=target.attention_bias,
        mlp_bias=target.mlp_bias,
        layers=layers if version == 3 else (),
    )


@torch.no_grad()
def fresh(config: EagleConfig, target: FrozenTarget, *, depth: int, vocabulary: DraftVocab) -> TrainableHead:
    """A network of this configuration; ``depth`` is how many layers the target has."""
    torch.manual_seed(0)
    network = TrainableHead(config, target.embedding, target.output.detach() if config.version == 1 else None)
    first, last = target.block(0), target.block(depth - 1)
    state = network.state_dict()
    weights: dict[str, Tensor] = {f"layer.{name}": value for name, value in last.items()}
    size = config.hidden_size
    if config.version == 3:
        weights["norm.weight"] = target.norm
        weights["lm_head.weight"] = target.output.detach()[vocabulary.ids.to(target.device)]
        weights["layer.hidden_norm.weight"] = last["input_layernorm.weight"]
        weights["layer.input_layernorm.weight"] = first["input_layernorm.weight"]
        for side in "qkv":
            name = f"self_attn.{side}_proj.weight"
            weights[f"layer.{name}"] = torch.cat([first[name], last[name]], 1)
        if config.target_hidden_size == size:
            fused = torch.zeros(size, config.feature_size)
            fused[:, -size:] = torch.eye(size)
            weights["fc.weight"] = fused
    else:
        fused = state["fc.weight"].clone()
        fused[:, size:] = _FC * torch.eye(size)
        weights["fc.weight"] = fused
    fitting = {name: value for name, value in weights.items() if name in state and value.shape == state[name].shape}
    network.load_state_dict({**state, **fitting})
    return network.to(target.device)


@torch.no_grad()
def continued(found: Checkpoint, target: FrozenTarget, *, where: Path) -> TrainableHead:
    """A trained head, to train on.

    Raises:
        CheckpointError: it has an embedding of its own, which no training here changes or keeps.
    """
    if found.embedding is not None:
        raise CheckpointError(f"{where} has an embedding of its own; only heads that share the target's are trained on")
    network = TrainableHead(
        found.config, target.embedding, target.output.detach() if found.config.version == 1 else None
    )
    network.load_state_dict({name: value.float() for name, value in found.weights.items() if name != "ids"})
    network.start = hashlib.sha256(b"".join(x.numpy().tobytes() for x in network.state_dict().values())).hexdigest()[
        :16
    ]
    return network.to(target.device)
