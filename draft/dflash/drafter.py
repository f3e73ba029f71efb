"""DFlash as a drafter: folders of heads, loaded for a target.

Tensors have the names of speculators, which are z-lab's and DeepSpec's too; those of transformers are translated.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict
from pathlib import Path

from torch import Tensor, nn

from paceline.core.errors import PairingError
from paceline.core.types import DraftKey, DraftShape, SamplingKind
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights.hub import checkpoint_path
from paceline.draft.dflash.config import DFlashConfig, parse
from paceline.draft.dflash.head import BlockStep, DFlashHead
from paceline.draft.drafted_tokens import Kept
from paceline.draft.heads import HeadDrafter
from paceline.draft.options import parse_draft_tree
from paceline.heads import layouts
from paceline.heads.checkpoint import as_dtype, check, drafted_ids, head_form, read, unless_equal
from paceline.heads.layouts import read_config

log = logging.getLogger("paceline")

EMBEDDING, HEAD, OFFSETS, MASK = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
_MODEL = "model."  # before every name, if a head was saved as a part of a model
_PREFIXES = (
    ("fc.", "encoder.fc."),
    ("hidden_norm.", "encoder.output_norm_enc."),
    ("candidate_selector.predecessor_codebook", "candidate_selector.predecessor_codebook.weight"),
    ("candidate_selector.successor_codebook", "candidate_selector.successor_codebook.weight"),
)
_HARMLESS = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")


def load(folder: Path, target: ModelConfig) -> tuple[DFlashConfig, dict[str, Tensor]]:
    """Read a head for this target: its configuration and tensors, with ``ids`` [U] in place of d2t and t2d."""
    raw, fields = read(folder), read_config(folder)
    found = layouts.sources({name: own_name(name) for name in raw})
    tensors = {name: raw[source] for name, source in found.items()}
    output = tensors.get(HEAD)
    config = parse(fields, target, drafted=None if output is None else len(output))
    offsets, mask = tensors.pop(OFFSETS, None), tensors.pop(MASK, None)
    log.info("%s: the head reads residual streams %s of the target", folder, list(config.layers))
    shapes = config.shapes()
    if EMBEDDING in tensors:
        shapes[EMBEDDING] = (config.vocab_size, config.hidden_size)
    if HEAD in tensors or config.draft_vocab_size != config.vocab_size:
        shapes[HEAD] = (config.draft_vocab_size, config.hidden_size)
    check(folder, tensors, shapes)
    sizes = (config.draft_vocab_size, config.vocab_size)
    return config, {**tensors, "ids": drafted_ids(sizes, offsets, mask, where=str(folder))}


def own_name(name: str) -> str | None:
    name = name.removeprefix(_MODEL)
    if any(name.endswith(end) for end in _HARMLESS):
        return None
    return layouts.own_name(name, _PREFIXES)


class DFlashDrafter(HeadDrafter):
    """Drafts with a DFlash head on a target's features.

    k      drafted tokens of a chain, or the shape of a static tree, whose nodes are the best tokens of each position
    drawn  sampled from the head's probabilities, for `Reject`
    """

    def __init__(self, head: DFlashHead, target: CompiledDecoder, k: int | DraftShape, *, drawn: bool = False) -> None:
        super().__init__(head, target, k)
        head.config.check_k(self.draft_shape.depth)
        self.head: DFlashHead = head
        self._drawn = drawn
        self.max_positions = min(target.n_positions, head.config.max_position_embeddings)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        target: CompiledDecoder,
        k: int = 4,
        *,
        drawn: bool = False,
        draft_tree: str = "chain",
        quantization: str | None = None,
    ) -> DFlashDrafter:
        """Load a head for ``target``, which shares its embedding and, unless the head has its own, its output layer.

        path          folder in the layout of z-lab, DeepSpec, speculators or transformers, or an id of the Hugging Face
                      hub
        k             drafted tokens per round; fewer if the head drafts fewer
        draft_tree    "chain", or "tree:PARENTS" with the parent of each node, -1 for the root; the children of a node
                      are the best tokens of its position
        quantization  format of the layers' matrices, a `WeightFormat`'s name, or "amp": the target's ``amp``; default:
                      int8 over a target whose matrices are integers or blocks, else "amp"

        Raises:
            CheckpointError: the folder cannot be used, or its weights not in the target's number format.
            PairingError: the head is for another target.
            ConfigurationError: ``quantization`` is out of range.
        """
        model, folder = target.body.model, checkpoint_path(path)
        config, weights = load(folder, target.config)
        if target.config.blueprint.head_bias:
            raise PairingError(
                "draft: expected a target whose output layer has no bias, which a DFlash head cannot share, got one "
                "with; use another drafter"
            )
        weights = as_dtype(folder, weights, target.options.dtype)
        for name, shared in ((EMBEDDING, model.embedding), (HEAD, model.head)):
            if unless_equal(weights.get(name), shared) is None:
                weights.pop(name, None)
        head = DFlashHead(
            config,
            weights,
            shared=target.body.shared,
            kernels=target.backend.kernels,
            options=target.options,
            form=head_form(target.body, quantization),
        )
        return cls(head, target, parse_draft_tree(draft_tree, k=min(k, config.most), drawn=drawn), drawn=drawn)

    def step(self, bucket: int, kind: SamplingKind) -> nn.Module:
        kept = Kept(self._drawn, parents=() if self.draft_shape.is_chain else self.draft_shape.parents or ())
        return BlockStep(self.head, self.draft_shape.depth, bucket, kept=kept, kind=kind)

    def step_key(self, bucket: int) -> DraftKey:
        return DraftKey("dflash", self.draft_shape, bucket, self._drawn)

    def cache_key(self) -> dict[str, object]:
        head, model = self.head, self.decoder.body.model
        own = [head.embedding is not model.embedding, head.output is not model.head]
        key: dict[str, object] = {"dflash": json.loads(json.dumps(asdict(head.config))), "own": own}
        return key if head.form is None else {**key, "quantization": head.form.value}
