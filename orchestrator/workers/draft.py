"""Draft model's worker: a pool of drafters over one model, one for each target that connects."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from paceline import vocab_compat, warmup
from paceline.core import probs, reduce
from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import PAD, Commit, RoundLimits, SamplingTensors
from paceline.decoder import steps
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.models.config import ModelConfig
from paceline.draft.model import ModelDrafter
from paceline.draft.vocab_map import VocabMap
from paceline.placement.lookahead import LookaheadDrafter
from paceline.placement.remote.messages import Handshake
from paceline.workers.config import WorkerConfig


class DraftPool:
    """One decoder for each target of the plan. They share their weights unless the model is sharded. The decoders and
    their graphs exist before the first target connects, and are reused.
    """

    def __init__(self, config: WorkerConfig, max_targets: int, vocab_sizes: Collection[int]) -> None:
        self._config, self._max_targets = config, max_targets
        first = config.load()
        self._k = config.speculative.longest_draft(first.backend.draft_lengths)
        # Each rank holds one cache, so a sharded model is loaded again for every target.
        siblings = (first.sibling() if config.options.tp_degree == 1 else config.load() for _ in range(max_targets - 1))
        self._free: list[CompiledDecoder] = [first, *siblings]
        self._acquired: dict[int, CompiledDecoder] = {}  # by the id of the drafter over it
        self._compiled = frozenset(vocab_sizes)
        for decoder in self._free:
            for size in vocab_sizes:
                compile_drafter(self._drafter(decoder, size), self._k + 1, rereads=config.draft_ahead)

    def acquire(self, handshake: Handshake) -> Drafter:
        """Return a drafter for a connecting target.

        Raises:
            ConfigurationError: the target has another batch size, or all decoders are in use.
        """
        config = self._config
        if handshake.slots != config.options.slots:
            raise ConfigurationError(
                f"batch_size: expected {handshake.slots} for the draft, as for target {handshake.target}, got "
                f"{config.options.slots}; set both to the same value"
            )
        if not self._free:
            raise ConfigurationError(
                f"max_targets: expected at most {self._max_targets} targets at a time, got one more; list more "
                "targets in `draft_of`, or raise `max_targets`"
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
        self._free.append(self._acquired.pop(id(drafter)))

    def _drafter(self, decoder: CompiledDecoder, vocab_size: int) -> ModelDrafter:
        vocabulary = VocabMap(vocab_size, decoder.config.vocab_size)
        return ModelDrafter(decoder, self._k + self._config.draft_ahead, vocabulary=vocabulary)


def make_drafters(settings: Mapping[str, object]) -> DraftPool:
    """Make the drafters of a draft's worker, by default.

    Own settings: ``max_targets``, the number of targets served at a time (default 1), and ``targets``, the checkpoint
    folders of the known targets. Their tokenizers are compared with the draft's, and graphs are compiled for their
    vocabulary sizes; those for another size when such a target connects.

    Raises:
        ConfigurationError: ``targets`` is not a list, or the model cannot be run as planned.
        PairingError: a target has another tokenizer.
    """
    config, targets = WorkerConfig.from_settings(settings), settings.get("targets", ())
    if not isinstance(targets, list | tuple):
        raise ConfigurationError(f"targets: expected a list of folders, got {targets!r}; correct the setting")
    own_size, sizes = ModelConfig.from_pretrained(config.folder).vocab_size, set[int]()
    for folder in map(Path, targets):
        size = ModelConfig.from_pretrained(folder).vocab_size
        vocab_compat.check_same_tokenizer((config.folder, folder), (own_size, size))
        sizes.add(size)
    return DraftPool(config, int(str(settings.get("max_targets", 1))), sizes)


def compile_drafter(drafter: ModelDrafter, width: int, *, rereads: bool) -> None:
    """Compile all graphs for proposing by running each once, in every KV bucket and sampling mode that warm-up covers.

    ``width``: tokens of the widest commit. ``rereads``: the drafter drafts asynchronously, and rereads rows for that.
    """
    decoder = drafter.decoder
    with decoder.backend.prepare():
        for start, size in warmup.gaps(decoder):
            drafter.read(0, [0] * size, start=start)
        slots = decoder.batch_size
        tokens = torch.full((slots, width), PAD, dtype=torch.int32)
        tokens[:, 0] = 0
        one, zero = torch.ones(slots, dtype=torch.int32), torch.zeros(slots, dtype=torch.int32)
        commit, greedy = Commit(tokens, one, zero), sampling_tensors([Sampling()] * slots)
        for rows in warmup.lengths(decoder):
            limits = RoundLimits([drafter.draft_shape.num_draft_tokens] * slots, rows)
            for used, kind in product(warmup.fills([decoder]), warmup.distinct_kinds([decoder])):
                drafter.propose(commit, replace(greedy, kind=kind), replace(limits, used_slots=used))
            if rereads:
                SecondChoices(decoder, drafter.vocabulary).reread(commit, rows)


_CANDIDATES = 64  # noise for every id of a large vocabulary would take longer than the model


class SecondChoices:
    """A `paceline.placement.lookahead.SecondChoiceModel` over a draft model. It rereads rows of the draft's cache, to
    repair it or to find second choices: one pass over a window, where a proposal takes one pass per token.
    """

    def __init__(self, decoder: CompiledDecoder, vocabulary: VocabMap) -> None:
        self._decoder, self._vocabulary = decoder, vocabulary

    def reread(self, commit: Commit, rows: int) -> None:
        self._window(commit.tokens, commit.first_row, rows)

    def seconds(
        self, commit: Commit, drafts: Tensor, sampling: SamplingTensors, *, rows: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return second choices and score gaps, as the protocol says. drafts [B, k] int32.

        Scores are the draft's logits. In slots that sample, they are divided by the temperature and get the noise of
        their position, which the target uses too. Only the most likely tokens are considered; the only filter applied
        is top-k.
        """
        end = commit.first_row + commit.count
        root = commit.tokens.gather(1, (commit.count - 1).to(torch.int64).unsqueeze(1))
        logits = probs.apply_temperature(self._window(torch.cat((root, drafts[:, :-1]), 1), end - 1, rows), sampling)
        first = drafts.clamp(min=0).to(torch.int64).unsqueeze(-1)
        likely, ids = logits.topk(min(_CANDIDATES, logits.shape[-1]))
        top_k = sampling.params[:, 1].view(-1, 1, 1)
        excluded = (ids == first) | ((top_k > 0) & (torch.arange(ids.shape[-1]) >= top_k))
        scores, ids = torch.cat((logits.gather(-1, first), likely), -1), torch.cat((first, ids), -1).to(torch.int32)
        if bool((sampling.params[:, 0] > 0).any()):
            positions = end.unsqueeze(1) + torch.arange(drafts.shape[1], dtype=torch.int32)
            scores = probs.add_gumbel(scores, positions, sampling, ids=ids)
        second = torch.where(excluded, reduce.NEGATIVE, scores[..., 1:]).max(-1)
        gaps = scores[..., 0] - second.values
        return ids[..., 1:].gather(-1, second.indices.unsqueeze(-1)).squeeze(-1).tolist(), gaps.tolist()

    def _window(self, tokens: Tensor, row: Tensor, rows: int) -> Tensor:
        """Logits [B, T, V] over the target's ids for tokens [B, T], whose first one is at row [B]."""
        kv_bucket = self._decoder.bucket_for(rows + tokens.shape[1])
        logits, _ = steps.window(self._decoder, self._vocabulary.known(tokens), row, bucket=kv_bucket)
        return self._vocabulary.logits(logits)
