"""EAGLE as a drafter: a pass over the last commit's real features, then drafts that grow from its last pair.

Each round rewrites the head's cache from the target's hidden states (EAGLE, arXiv 2401.15077), so that old drafts have
no effect: after any number of rounds the cache is that of one pass over the committed tokens. The first drafts come
from that same pass. Shapes of drafts are in `paceline.eagle.tree`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from paceline.core.errors import CheckpointError, ConfigurationError
from paceline.core.types import DraftKey, SamplingKind
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.weights.files import check_finite
from paceline.decoder.weights.hub import checkpoint_path
from paceline.draft.heads import HeadDrafter
from paceline.eagle import checkpoint
from paceline.eagle.config import parse_layers
from paceline.eagle.division import embedding_part, is_divided, part_of, shard_of
from paceline.eagle.head import EagleHead
from paceline.eagle.network import masked_state
from paceline.eagle.tree import Chain, DraftTree, parse_draft_tree
from paceline.heads.checkpoint import as_dtype, head_form, unless_equal


class EagleDrafter(HeadDrafter):
    """Drafts with an EAGLE head on a target's features. PairingError: the head is for another target;
    ConfigurationError: the draft tree does not fit.
    """

    misfit_causes = (
        "layer ids that are a guess (set aux_layers); norms that the config.json does not tell; another base model, or "
        "one trained further; prompts without the chat template of the training"
    )

    def __init__(self, head: EagleHead, target: CompiledDecoder, draft_tree: DraftTree) -> None:
        if not isinstance(draft_tree, DraftTree):
            raise ConfigurationError(
                f"draft_tree: expected Chain(k), StaticTree(parents) or DynamicTree(...), got {draft_tree!r}; "
                "correct it"
            )
        head.config.check_target(target.config)
        parallel = head.config.mask_token is not None
        if parallel and draft_tree.draft_shape.dynamic:
            raise ConfigurationError(
                "draft_tree: expected a chain or a static tree for a P-EAGLE head, whose drafts do not read each "
                f"other, got {draft_tree.name}; omit it"
            )
        super().__init__(head, target, draft_tree.draft_shape)
        room = target.options.rows - target.n_positions
        rows = self.draft_shape.num_draft_tokens + self.draft_shape.depth if parallel else draft_tree.rows
        if rows > room:
            raise ConfigurationError(
                f"draft_tree: expected at most {room} cache rows after the last position, got {rows} for "
                f"a {draft_tree.name} while it grows; reduce its width or depth"
            )
        self.head: EagleHead = head
        self.draft_tree = draft_tree
        self.max_positions = min(target.n_positions, head.config.max_position_embeddings)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        target: CompiledDecoder,
        draft_tree: DraftTree | str = "chain",
        *,
        k: int = 4,
        drawn: bool = False,
        aux_layers: str | int | Sequence[int] | None = None,
        divided: bool | None = None,
        quantization: str | None = None,
    ) -> EagleDrafter:
        """Load a head for ``target``, which shares its embedding and, where the head has none, its output layer.

        path        folder in the layout of the EAGLE repository, NxD Inference, speculators, or our own; or an id of
                    the Hugging Face hub
        draft_tree  how drafts grow, also as text (`paceline.eagle.tree.parse_draft_tree`); default: a chain of ``k``
        drawn       the chain is sampled from the head's probabilities, for acceptor="reject"
        aux_layers  residual streams of the target that a head of version 3 reads, as in (2, 16, 29) or "2,16,29", in
                    place of its config.json's; the choice is logged
        divided     whether the head is sharded over the ranks of a sharded target, or replicated, which needs fewer
                    collectives and reads more bytes; default: the faster one by
                    `paceline.eagle.division.WORTH_DIVIDING`
        quantization  format of the head's own matrices, a `WeightFormat`'s name, or "amp": the target's ``amp``;
                    default: int8 over a target whose matrices are integers or blocks, else "amp"

        Raises:
            CheckpointError: the folder cannot be used, or its weights not in the target's number format.
            PairingError: the head is for another target.
            ConfigurationError: the draft tree or ``aux_layers`` does not fit.
        """
        draft_tree = parse_draft_tree(draft_tree, k=k, drawn=drawn)
        model, folder, dtype = target.body.model, checkpoint_path(path), target.options.dtype
        # With a sharded target this is rank 0, whose rows are the first: equality of those is taken as equality of all.
        output = model.head[: target.config.vocab_size] if isinstance(model.head, Tensor) else None
        loaded = checkpoint.load(folder, target.config, head=output, aux_layers=parse_layers(aux_layers))
        weights, embedding = _weights(loaded, dtype, folder)
        embedding = unless_equal(embedding, model.embedding)
        degree = target.backend.group.degree
        make = partial(
            EagleHead,
            loaded.config,
            shared=target.body.shared,
            kernels=target.backend.kernels,
            options=target.options,
            form=head_form(target.body, quantization),
        )
        if not is_divided(loaded.config, degree, divided):
            return cls(make(weights, embedding=embedding), target, draft_tree)
        head, *others = (
            make(
                part_of(weights, loaded.config, shard_of(loaded.config, degree, rank)),
                embedding=None if embedding is None else embedding_part(embedding, degree, rank),
                group=target.backend.group,
            )
            for rank in range(degree)
        )
        drafter = cls(head, target, draft_tree)
        target.backend.divide(head, others)
        return drafter

    @property
    def learns(self) -> bool:
        """Whether `adopt` can replace the weights: they are in this process, and none is a copy of the target's."""
        return self.head.group.degree == 1 and self.head.embedding is self.decoder.body.shared.embedding

    def adopt(self, path: str | os.PathLike[str]) -> None:
        """Replace the head's weights by those of a later training of it, between two rounds. Its cache stays.
        CheckpointError: the folder cannot be used, or holds another kind of head.
        """
        target, folder = self.decoder, checkpoint_path(path)
        loaded = checkpoint.load(folder, target.config)
        if loaded.config != self.head.config or loaded.embedding is not None:
            raise CheckpointError(
                f"{folder}: expected a head trained from the one in use, got another kind; give one of its kind"
            )
        weights, _ = _weights(loaded, target.options.dtype, folder)
        if "ids" in weights and not weights["ids"].equal(self.head.ids.to(torch.int64)):
            raise CheckpointError(
                f"{folder}: expected a head that drafts the ids of the one in use, got others; train it from that one"
            )
        options, form = replace(target.options, load=replace(target.options.load, batch_size=1)), self.head.form
        shared, kernels = target.body.shared, target.backend.kernels
        others = EagleHead(
            loaded.config, weights, shared=shared, kernels=kernels, options=options, form=form
        ).state_dict()
        caches = {id(x) for pair in self.head.caches() for x in pair}
        for name, mine in self.head.state_dict(keep_vars=True).items():
            if id(mine) not in caches and name != "slots":
                mine.data.copy_(others[name])
        target.forget(self.state)

    def shortened(self, length: int) -> Self:
        shorter = super().shortened(length)
        shorter.draft_tree = Chain(length, drawn=isinstance(self.draft_tree, Chain) and self.draft_tree.drawn)
        return shorter

    def step(self, bucket: int, kind: SamplingKind) -> nn.Module:
        return self.draft_tree.step(self.head, bucket, kind)

    def step_key(self, bucket: int) -> DraftKey:
        config = self.head.config
        kind = f"eagle{config.version}" if config.mask_token is None else "peagle"
        return DraftKey(kind, self.draft_shape, bucket, variant=self.draft_tree.name)

    def cache_key(self) -> dict[str, object]:
        """Facts on which the drafter's graphs depend. The draft tree is in `step_key`: graphs that only prefill do not
        depend on it.
        """
        has_embedding = self.head.embedding is not self.decoder.body.model.embedding
        config: dict[str, object] = json.loads(json.dumps(asdict(self.head.config)))
        key = {"eagle": config, "own embedding": has_embedding, "ranks": self.head.group.degree}
        return key if self.head.form is None else {**key, "quantization": self.head.form.value}


def _weights(loaded: checkpoint.Head, dtype: torch.dtype, folder: Path) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return a head's weights and its embedding in the target's number format, as `EagleHead` takes them."""
    weights, embedding = as_dtype(folder, loaded.weights, dtype), loaded.embedding
    if loaded.config.mask_token is not None:
        weights["masked"] = masked_state(loaded.config, weights)
        del weights["mask_hidden"]
    if embedding is not None:
        embedding = check_finite("its embedding", embedding, dtype, where=folder)
    return weights, embedding
