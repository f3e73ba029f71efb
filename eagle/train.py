"""Training of EAGLE heads: from a target and a stream of tokens to a folder with a trained and measured head.

``work`` keeps the target's hidden states up to a limit, and the training's state, from which it resumes.

EAGLE-1 (arXiv 2401.15077, section 4.2): smooth L1 on the next hidden state, and cross-entropy against the target's
distribution. EAGLE-3 (arXiv 2503.01840): cross-entropy alone, over several passes in which the head reads its own
output, each with 0.8 times the weight of the previous one. P-EAGLE (arXiv 2602.01469): the same, but later passes read
what stands for positions not yet known.

A fresh head starts from the target's last layer, norms and output layer; the papers start with random layers. Tensors
that do not fit (another width, other heads) are random.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.core.errors import CheckpointError, ConfigurationError
from paceline.decoder.models.config import ModelConfig
from paceline.eagle import checkpoint
from paceline.eagle.checkpoint import Head
from paceline.eagle.config import (
    EagleConfig,
    EagleHeadOptions,
    EagleTraining,
    check_version,
    default_layers,
    layer_prefix,
)
from paceline.eagle.network import Past, TrainableHead
from paceline.heads.checkpoint import Checkpoint, DraftVocab
from paceline.heads.features import Corpus, TrainingData
from paceline.heads.frozen_model import FrozenTarget, Texts
from paceline.heads.layouts import write_json
from paceline.heads.losses import LOSSES, chain_loss, right, target_probs
from paceline.heads.options import CachedTextOptions
from paceline.heads.trainer import CorpusTrainer, Progress, rank


def objective(
    network: TrainableHead, texts: Texts, options: EagleTraining, *, head: Tensor, vocabulary: DraftVocab
) -> Tensor:
    """Return the loss of a batch of sequences, a scalar. ``head`` [V, H] is the target's output layer."""
    places = torch.ones_like(texts.tokens, dtype=torch.bool) if texts.counted is None else texts.counted
    last = texts.last[places].float()
    probs, inside = target_probs(last, head, vocabulary)
    rows = (places.flatten().cumsum(0) - 1).view_as(places)  # of a counted position among them
    count = min(options.passes(network.config.version), places.shape[1] - 1)
    losses, features = last.new_zeros(*places.shape, count), last.new_zeros(())
    rates, known = torch.ones_like(losses), torch.zeros_like(losses, dtype=torch.bool)
    for index, (hidden, ahead) in enumerate(passes(network, texts, count)):
        here = F.pad(places[:, ahead:], (0, ahead))  # of a chain that starts at a position
        at, hidden = rows[:, ahead:][here[:, :-ahead]], hidden[here[:, :-ahead]]
        logits = network.logits(hidden).float()
        losses[..., index][here] = LOSSES[options.loss](logits, probs[at])
        known[..., index][here] = inside[at]
        if options.decay is None:
            rates[..., index][here] = right(logits.detach(), probs[at])
        if network.config.version == 1 and options.feature_weight and len(at):
            features = features + options.ttt_decay**index * F.smooth_l1_loss(hidden.float(), last[at])
    total = chain_loss(losses, rates, known, decay=options.decay)
    return total if network.config.version == 3 else options.ce_weight * total + options.feature_weight * features


def passes(network: TrainableHead, texts: Texts, count: int) -> list[tuple[Tensor, int]]:
    """Run the training-time test. For every pass: hidden [b, S - a, H], and the offset a of the target's state that it
    predicts.

    Row i of pass j has read the target's features up to position i and the tokens up to i + 1 + j, and predicts the
    token that the target's state at position i + a, a = 1 + j, predicts. In a P-EAGLE head, pass j is the j-th position
    not yet known: it has read the tokens up to i + 1 and nothing of the earlier passes' output.
    """
    past: Past = []
    size = texts.tokens.shape[1]
    features = texts.last if network.config.version == 1 else texts.streams
    hidden = network.fuse(features.float())
    predictions = []
    for index in range(min(count, size - 1)):
        tokens = texts.tokens.roll(-1 - index, 1)
        if index and network.config.mask_token is not None:
            tokens, hidden = network.unknown(tokens)
        hidden = network(tokens, hidden, past)
        predictions.append((hidden[:, : size - 1 - index], 1 + index))
    return predictions


@torch.no_grad()
def replayed(
    network: TrainableHead,
    texts: Texts,
    count: int,
    *,
    target: FrozenTarget,
    head: Tensor,
    vocabulary: DraftVocab,
    seed: int,
) -> Texts:
    """Return texts that end in the head's own drafts where it was wrong, with the target's states on them (Draft-OPD,
    arXiv 2605.29343).

    Every text is decoded with chains of ``count`` drafts; one of the rounds in which a draft is rejected is replayed:
    the text up to its beginning, then all its drafts, whose positions alone count.
    """
    count = min(count, texts.tokens.shape[1] - 2)
    agreed, drafts = _agreements(network, texts, count, head=head, vocabulary=vocabulary)
    lengths = agreed.sum(1).tolist()
    places = torch.ones_like(texts.tokens, dtype=torch.bool) if texts.counted is None else texts.counted
    rng = random.Random(seed)
    rows, counted = [], torch.zeros_like(places)
    for row, tokens in enumerate(texts.tokens):
        wrong, place, counts = [], 0, places[row].tolist()
        while place < len(lengths[row]):
            if counts[place + 1] and lengths[row][place] < count:
                wrong.append(place)
            place += 1 + lengths[row][place] if counts[place + 1] else 1
        if wrong:
            place = rng.choice(wrong)
            tokens = tokens.clone()
            tokens[place + 2 : place + 2 + count] = drafts[row, :, place][: len(tokens) - place - 2]
            counted[row, place + 1 : place + 1 + count] = True
        rows.append(tokens)
    read = target.read(torch.stack(rows))
    return Texts(read.tokens, read.last, read.streams, counted)


@torch.no_grad()
def acceptance(
    network: TrainableHead, texts: Texts, *, depth: int, head: Tensor, vocabulary: DraftVocab, skip: int
) -> list[float]:
    """Return the share of positions from ``skip`` on at which drafts 1, 2, ... are all the target's greedy token.

    On sequences that the target wrote greedily this is the acceptance of greedy chains that start at each position.
    """
    parts = [texts.rows(index, 8) for index in range(-(-len(texts.tokens) // 8))]
    agreements = [_agreements(network, part, depth, head=head, vocabulary=vocabulary)[0] for part in parts]
    agreed = torch.cat(agreements)
    places = torch.ones_like(agreed[:, 0])
    if texts.counted is not None:  # a chain counts if all its drafts count
        places = texts.counted.unfold(1, depth + 1, 1).all(-1)
    places[:, :skip] = False
    if not bool(places.any()):
        raise ConfigurationError(
            f"data: expected at least one sequence to evaluate on with space for {depth} draft tokens, got none; "
            "give more or longer ones"
        )
    return [float(row[places].double().mean()) for row in agreed.unbind(1)]


def _agreements(
    network: TrainableHead, texts: Texts, count: int, *, head: Tensor, vocabulary: DraftVocab
) -> tuple[Tensor, Tensor]:
    """Return whether drafts up to this pass were all right, and the drafts, [b, passes, places]."""
    choices = F.linear(texts.last.float(), head).argmax(-1)
    size = texts.tokens.shape[1] - count
    standing = torch.ones(len(texts.tokens), size, dtype=torch.bool, device=choices.device)
    rows, every = [], []
    for hidden, ahead in passes(network, texts, count):
        drafts = vocabulary.ids[network.logits(hidden[:, :size]).argmax(-1)]
        standing = standing & (drafts == choices[:, ahead : ahead + size])
        rows.append(standing)
        every.append(drafts)
    return torch.stack(rows, 1), torch.stack(every, 1)


_FC = 0.5  # diagonal of the fc of version 1, which mixes a token and a feature


def default_config(
    target: ModelConfig, *, version: int, layers: tuple[int, ...], draft_vocab_size: int, **parts: Any
) -> EagleConfig:
    """Return a head configuration with the target's own sizes. ``parts``: what heads after EAGLE-3 have."""
    longest = target.rope.longest or target.max_position_embeddings
    sizes = EagleConfig.of(target) | {"max_position_embeddings": min(target.max_position_embeddings, longest)}
    return EagleConfig(
        **sizes,
        version=version,
        draft_vocab_size=draft_vocab_size if version == 3 else target.vocab_size,
        target_hidden_size=target.hidden_size,
        layers=layers if version == 3 else (),
        **parts,
    )


@torch.no_grad()
def fresh(config: EagleConfig, target: FrozenTarget, *, depth: int, vocabulary: DraftVocab) -> TrainableHead:
    """Create a network of this configuration; ``depth`` is the target's number of layers."""
    torch.manual_seed(0)
    network = TrainableHead(config, target.embedding, None if config.owns_output else target.output.detach())
    first, last = target.block(0), target.block(depth - 1)
    state = network.state_dict()
    weights: dict[str, Tensor] = {f"layer.{name}": value for name, value in last.items()}
    size = config.hidden_size
    if config.version == 3:
        weights["norm.weight"] = target.norm
        if config.owns_output:
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
        for index in range(1, config.num_layers):  # adds nothing until it has learnt to
            weights |= {f"{layer_prefix(index)}{name}": x for name, x in last.items()}
            for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                weights[f"{layer_prefix(index)}{name}"] = torch.zeros_like(last[name])
    else:
        fused = state["fc.weight"].clone()
        fused[:, size:] = _FC * torch.eye(size)
        weights["fc.weight"] = fused
    fitting = {name: value for name, value in weights.items() if name in state and value.shape == state[name].shape}
    network.load_state_dict({**state, **fitting})
    return network.to(target.device)


@torch.no_grad()
def continued(found: Head, target: FrozenTarget, *, where: Path) -> TrainableHead:
    """Load a trained head to continue its training; it must share the target's embedding."""
    if found.embedding is not None:
        raise CheckpointError(
            f"start: expected a head that shares the target's embedding, got {where} with its own; continue from "
            "another head"
        )
    network = TrainableHead(
        found.config, target.embedding, None if found.config.owns_output else target.output.detach()
    )
    network.load_state_dict({name: value.float() for name, value in found.weights.items() if name != "ids"})
    network.start = hashlib.sha256(b"".join(x.numpy().tobytes() for x in network.state_dict().values())).hexdigest()[
        :16
    ]
    return network.to(target.device)


Measure = Callable[[TrainableHead], list[float]]
"""Return shares of positions at which chains of 1, 2, ... drafts are all right."""


class EagleTrainer(CorpusTrainer):
    """Trains a head in place; ``measure`` is logged at intervals.

    head        [V, H], the target's output layer
    vocabulary  ids that the head drafts
    target      what supervises replayed drafts; needed if ``options.replay`` is set
    """

    def __init__(
        self,
        network: TrainableHead,
        corpus: Corpus,
        options: EagleTraining,
        *,
        head: Tensor,
        vocabulary: DraftVocab,
        folder: Path,
        measure: Measure | None = None,
        target: FrozenTarget | None = None,
    ) -> None:
        self.network, self._training, self._target = network, options, target
        self._head, self._vocabulary = head, vocabulary
        super().__init__(
            network,
            corpus,
            options,
            folder=folder,
            key={**asdict(network.config), "drafted ids": vocabulary.key, "start": network.start},
            measure=None if measure is None else lambda: measure(network),
        )

    def objective(self, batch: Texts) -> Tensor:
        given: Any = {"head": self._head, "vocabulary": self._vocabulary}
        loss = objective(self.network, batch, self._training, **given)
        if not self._training.replay:
            return loss
        assert self._target is not None, "replay needs the target"
        count = self._training.passes(self.network.config.version)
        again = replayed(self.network, batch, count, target=self._target, seed=self.step, **given)
        return loss + self._training.replay * objective(self.network, again, self._training, **given)


MEASURED = "acceptance.json"


def train(
    target: Path,
    data: TrainingData,
    head: EagleHeadOptions,
    *,
    texts: CachedTextOptions,
    options: EagleTraining,
    work: Path,
    out: Path,
    report: Progress,
) -> list[float] | None:
    """Train a head and write it to ``out`` in bfloat16, with acceptance.json; None if the time limit ended the run.

    Returns the share of positions at which chains of 1, 2, ... drafts are all right.
    """
    sizes = ModelConfig.from_pretrained(target)
    check(head, texts, sizes)
    frozen, network, vocabulary = _begin(target, data, head, sizes=sizes, options=options)
    features = data.corpus(frozen, texts, folder=work / "states")
    eval_texts, output = features.eval_texts(), frozen.output.detach()

    def measure(network: TrainableHead) -> list[float]:
        skip = data.skip(texts)
        return acceptance(network, eval_texts, depth=head.depth, head=output, vocabulary=vocabulary, skip=skip)

    trainer = EagleTrainer(
        network,
        features,
        options,
        head=output,
        vocabulary=vocabulary,
        folder=work,
        measure=measure,
        target=frozen,
    )
    if not trainer.run(report):
        return None
    shares = measure(network)
    if not rank():
        write(out, network, vocabulary, shares=shares)
    return shares


def _begin(
    target: Path, data: TrainingData, head: EagleHeadOptions, *, sizes: ModelConfig, options: EagleTraining
) -> tuple[FrozenTarget, TrainableHead, DraftVocab]:
    """Return the target, and the head before the first step: fresh, or one to continue."""
    if head.start is not None:
        found = checkpoint.load(head.start, sizes)
        frozen = FrozenTarget(target, found.config.layers, precision=options.precision, device=options.device)
        vocabulary = DraftVocab(found.weights.get("ids", torch.arange(sizes.vocab_size)), sizes.vocab_size)
        return frozen, continued(found, frozen, where=head.start), vocabulary.to(options.device)
    layers = head.layers or (default_layers(sizes.num_layers) if head.version == 3 else ())
    frozen = FrozenTarget(target, layers, precision=options.precision, device=options.device)
    counts = data.counts(sizes.vocab_size)
    drafted = sizes.vocab_size if head.draft_vocab_size is None else head.draft_vocab_size
    vocabulary = DraftVocab.frequent(counts, drafted).to(options.device)
    mask = int(counts.argmin()) if head.peagle and head.mask_token is None else head.mask_token
    config = default_config(
        sizes,
        version=head.version,
        layers=layers,
        draft_vocab_size=len(vocabulary.ids),
        num_layers=head.num_layers,
        qk_norm=head.qk_norm,
        fc_norm=head.fc_norm,
        norm_output=head.norm_output,
        mask_token=mask,
    )
    return frozen, fresh(config, frozen, depth=sizes.num_layers, vocabulary=vocabulary), vocabulary


def check(head: EagleHeadOptions, texts: CachedTextOptions, sizes: ModelConfig) -> None:
    """Raise ConfigurationError, or CheckpointError for an unknown version, if the target supports no such head."""
    check_version(head.version)
    if head.start is not None:
        if head.layers or head.draft_vocab_size is not None or head.parts():
            raise ConfigurationError(
                "start: expected the layers and draft vocabulary of that head, and its other parts, got "
                f"{', '.join(head.parts()) or 'others'}; omit them"
            )
        version = checkpoint.load(head.start, sizes).config.version
        if version != head.version:
            raise ConfigurationError(
                f"version: expected {version}, the version of {head.start}, got {head.version}; give version={version}"
            )
    if any(not 0 <= layer <= sizes.num_layers for layer in head.layers):
        raise ConfigurationError(
            f"layers: expected residual streams from 0 to {sizes.num_layers} of this target, got "
            f"{list(head.layers)}; correct them"
        )
    if head.draft_vocab_size is not None and (head.version != 3 or not 1 <= head.draft_vocab_size <= sizes.vocab_size):
        raise ConfigurationError(
            f"draft_vocab_size: expected 1 to {sizes.vocab_size} for a head of version 3, and all ids for version "
            f"1, got {head.draft_vocab_size} for version {head.version}; correct it"
        )
    if head.parts() and head.version != 3:
        raise ConfigurationError(
            f"{head.parts()[0]}: expected a head of version 3, got version {head.version}; omit it, or give version=3"
        )
    if head.num_layers < 1 or (
        head.mask_token is not None and not (head.peagle and head.mask_token < sizes.vocab_size)
    ):
        raise ConfigurationError(
            f"num_layers, mask_token: expected at least one layer, and an id below {sizes.vocab_size} for a P-EAGLE "
            f"head only, got {head.num_layers} and {head.mask_token}; correct them"
        )
    texts.check_room(sizes.max_position_embeddings, head.depth)
    if head.version == 3 and not head.layers and head.start is None:
        default_layers(sizes.num_layers)


def write(out: Path, network: TrainableHead, vocabulary: DraftVocab, *, shares: list[float]) -> None:
    state = network.state_dict()
    weights: dict[str, Tensor] = {name: x.detach().to("cpu", torch.bfloat16) for name, x in state.items()}
    if network.config.version == 3:
        weights["ids"] = vocabulary.ids.cpu()
    checkpoint.save(out, Checkpoint(network.config, weights))
    write_json(out / MEASURED, {"greedy chains": [round(share, 4) for share in shares]})
