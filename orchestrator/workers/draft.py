"""What the worker of a draft model runs: a pool of drafters over one model, one for each target that calls.

Not here: the process, its socket and its cores (`paceline.placement`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from paceline import vocab_compat
from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import PAD, Commit, RoundLimits
from paceline.decoder.backends import base as backends
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.models.config import ModelConfig
from paceline.draft.model import ModelDrafter
from paceline.draft.vocab_map import VocabMap
from paceline.engine import warmup
from paceline.placement.lookahead.drafter import LookaheadDrafter
from paceline.placement.remote.messages import Handshake
from paceline.workers.config import WorkerConfig
from paceline.workers.second_choices import SecondChoices


class DraftPool:
    """One decoder for each target of the plan, over the same weights unless the model is divided over ranks.

    The decoders and their graphs exist before the first target connects. When a target disconnects, the next one takes
    its decoder over. A `paceline.placement.remote.server.DrafterPool`.
    """

    def __init__(self, config: WorkerConfig, max_targets: int, vocab_sizes: Collection[int]) -> None:
        self._config, self._max_targets = config, max_targets
        first = config.load()
        self._k = config.speculative.longest_draft(first.backend.draft_lengths)
        # Ranks hold one cache each, so a divided model is loaded again for every target.
        siblings = (first.sibling() if config.tp_degree == 1 else config.load() for _ in range(max_targets - 1))
        self._free: list[CompiledDecoder] = [first, *siblings]
        self._acquired: dict[int, CompiledDecoder] = {}  # by the id of the drafter over it
        self._compiled = frozenset(vocab_sizes)
        for decoder in self._free:
            for size in vocab_sizes:
                compile_drafter(self._drafter(decoder, size), self._k + 1, rereads=config.draft_ahead)

    def acquire(self, handshake: Handshake) -> Drafter:
        """See `paceline.placement.remote.server.DrafterPool`.

        Raises:
            ConfigurationError: the target has another batch size, or all decoders are in use.
        """
        config = self._config
        if handshake.slots != config.batch_size:
            raise ConfigurationError(
                f"target {handshake.target} has {handshake.slots} slots and its draft {config.batch_size}; give both "
                "the same batch_size"
            )
        if not self._free:
            raise ConfigurationError(
                f"this draft serves {self._max_targets} targets at a time, and that many are connected; name more "
                "targets in `draft_of`, or raise the setting `max_targets`"
            )
        decoder = self._free[-1]
        model = self._drafter(decoder, handshake.vocab_size)
        if handshake.vocab_size not in self._compiled:
            compile_drafter(model, self._k + 1, rereads=config.draft_ahead)
        drafter: Drafter = model
        if config.draft_ahead:
            drafter = LookaheadDrafter(model, SecondChoices(decoder, model.vocabulary))
        self._acquired[id(drafter)] = self._free.pop()
        return drafter

    def release(self, drafter: Drafter) -> None:
        """See `paceline.placement.remote.server.DrafterPool`."""
        self._free.append(self._acquired.pop(id(drafter)))

    def _drafter(self, decoder: CompiledDecoder, vocab_size: int) -> ModelDrafter:
        vocabulary = VocabMap(vocab_size, decoder.config.vocab_size)
        return ModelDrafter(decoder, self._k + self._config.draft_ahead, vocabulary=vocabulary)


def make_drafters(settings: Mapping[str, object]) -> DraftPool:
    """The default maker of a draft's worker.

    Settings of its own: ``max_targets``, the targets it serves at a time (default 1), and ``targets``, the checkpoint
    folders of those that are known. Their tokenizers are compared with the draft's, and graphs for the sizes of their
    vocabularies are made here; those for other sizes when such a target connects.

    Raises:
        ConfigurationError: ``targets`` is not a list, or the model cannot be run as planned.
        PairingError: a target has another tokenizer.
    """
    config, targets = WorkerConfig.from_settings(settings), settings.get("targets", ())
    if not isinstance(targets, list | tuple):
        raise ConfigurationError(f"the setting targets must be a list of folders, not {targets!r}")
    own_size, sizes = ModelConfig.from_pretrained(config.folder).vocab_size, set[int]()
    for folder in map(Path, targets):
        size = ModelConfig.from_pretrained(folder).vocab_size
        vocab_compat.check_same_tokenizer((config.folder, folder), (own_size, size))
        sizes.add(size)
    return DraftPool(config, int(str(settings.get("max_targets", 1))), sizes)


def compile_drafter(drafter: ModelDrafter, width: int, *, rereads: bool) -> None:
    """Make every graph that proposing takes, in every KV bucket and for every kind of sampling that warm-up knows,
    by running each of them once.

    ``width``: tokens of the widest commit. ``rereads``: the drafter works ahead, and reads rows again for that.
    """
    decoder = drafter.decoder
    with backends.prepare(decoder.backend):
        for start, size in warmup.gaps(decoder):
            drafter.read(0, [0] * size, start=start)
        slots = decoder.batch_size
        tokens = torch.full((slots, width), PAD, dtype=torch.int32)
        tokens[:, 0] = 0
        one, zero = torch.ones(slots, dtype=torch.int32), torch.zeros(slots, dtype=torch.int32)
        commit, greedy = Commit(tokens, one, zero), sampling_tensors([Sampling()] * slots)
        for rows in warmup.lengths(decoder):
            limits = RoundLimits(zero + drafter.draft_shape.num_draft_tokens, rows)
            for used, kind in product(warmup.fills([decoder]), warmup.distinct_kinds([decoder])):
                drafter.propose(commit, replace(greedy, kind=kind), replace(limits, used_slots=used))
            if rereads:
                SecondChoices(decoder, drafter.vocabulary).reread(commit, rows)
