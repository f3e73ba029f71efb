"""Small random Llama checkpoints, and decoders over them that all tests share; no tests.

The draft is the target without its last layer, so that it is right often and wrong often. Graphs depend on shapes
alone: with a few shapes for all tests, little is compiled.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import AutoDecoder
from paceline.auto import SamplingDecoder
from tests.decoder import families

VOCABULARY = 96
POSITIONS = 128
CHUNK = 16

KINDS: dict[str, dict[str, object]] = {
    "grouped": {},
    "llama 2": {"num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "llama 3": {
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "biased": {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
    "one key head": {"num_key_value_heads": 1, "head_dim": 16},
    "blocks": {"intermediate_size": 64},
    "blocks of two ranks": {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128},
    "odd": {
        "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 50,
        "vocab_size": 97,
    },
}  # fmt: skip


def network(kind: str = "grouped", *, layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    """A random model. Layers beyond the first add little, so that a model without them resembles it."""
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": POSITIONS, "bos_token_id": None,
        "eos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    made = LlamaForCausalLM(LlamaConfig(**{**shape, **KINDS[kind], "num_hidden_layers": layers})).eval()
    for name, parameter in made.named_parameters():
        later = "layers." in name and "layers.0." not in name
        mean = 1.0 if "norm" in name else 0.0
        torch.nn.init.normal_(parameter, mean, 0.25 if later else 0.35)
    return made


def save_pair(folder: Path, kind: str = "grouped", *, seed: int = 0) -> None:
    """``folder/target`` of two layers and ``folder/draft``, its first layer."""
    target, draft = network(kind, seed=seed), network(kind, layers=1, seed=seed)
    draft.load_state_dict(target.state_dict(), strict=False)
    target.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")


class Workshop:
    """Makes decoders over tiny checkpoints; the same wishes give the same decoder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[object, ...], SamplingDecoder] = {}

    def checkpoint(self, role: str = "target", kind: str = "grouped", *, seed: int = 0) -> Path:
        """Folder of a tiny checkpoint. ``role``: "target" or "draft"; ``kind``: of `KINDS` or `families.FAMILIES`."""
        folder = self._folder / f"{kind} {seed}"
        if not folder.exists():
            if kind in families.FAMILIES:
                families.save_pair(folder, kind)
            else:
                save_pair(folder, kind, seed=seed)
        return folder / role

    def decoder(
        self,
        role: str = "target",
        *,
        backend: str = "native",
        amp: str = "f32",
        slots: int = 4,
        kind: str = "grouped",
        seed: int = 0,
        **more: object,
    ) -> SamplingDecoder:
        """A decoder, shared by all tests that ask for the same. ``more``: other options of loading."""
        wishes = (role, backend, amp, slots, kind, seed, repr(sorted(more.items())))
        if wishes not in self._made:
            options = {"batch_size": slots, **more}
            made = fresh(self.checkpoint(role, kind, seed=seed), backend=backend, amp=amp, **options)  # type: ignore[arg-type]
            made.on_graph = lambda _event: None
            self._made[wishes] = made
        return self._made[wishes]

    def pair(
        self, *, backend: str = "native", amp: str = "f32", slots: int = 4
    ) -> tuple[SamplingDecoder, SamplingDecoder]:
        draft, target = (self.decoder(r, backend=backend, amp=amp, slots=slots) for r in ("draft", "target"))
        return draft, target


def load(folder: Path, **options: object) -> SamplingDecoder:
    """A separate decoder over plain PyTorch, in float32, unless the options say otherwise."""
    return AutoDecoder.from_pretrained(folder, **{"backend": "eager", "amp": "f32", **options})  # type: ignore[arg-type]


def fresh(
    folder: Path, *, backend: str = "native", amp: str = "f32", batch_size: int | list[int] = 1, **more: object
) -> SamplingDecoder:
    """A separate decoder, in the shapes all tests share."""
    return AutoDecoder.from_pretrained(
        folder, backend=backend, amp=amp, batch_size=batch_size, context_length_estimate=[CHUNK], **more
    )
