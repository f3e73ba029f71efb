"""Training of EAGLE heads: from a target and a stream of tokens to a folder with a trained and measured head.

Results are kept in ``work``: the target's hidden states up to a limit, and the training's state, so that an interrupted
run resumes when it is started again. Text files and progress output are elsewhere.

EAGLE-1 (arXiv 2401.15077, section 4.2): smooth L1 on the next hidden state, and cross-entropy against the target's
distribution. EAGLE-3 (arXiv 2503.01840): cross-entropy alone, over several passes in which the head reads its own
output, each with 0.8 times the weight of the previous one. P-EAGLE (arXiv 2602.01469): the same, but later passes read
what stands for positions not yet known.

A fresh head starts from the target's last layer, norms and output layer. The papers start with random layers. Tensors
that do not fit (another width, other heads) are random.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.core.errors import CheckpointError, ConfigurationError
from paceline.decoder.models.config import ModelConfig
from paceline.eagle import checkpoint
from paceline.eagle.checkpoint import DraftVocab, Head
from paceline.eagle.config import (
    EagleConfig,
    EagleHeadOptions,
    EagleTraining,
    check_version,
    default_layers,
    layer_prefix,
)
from paceline.eagle.network import Past, TrainableHead
from paceline.heads.checkpoint import Checkpoint
from paceline.heads.features import FeatureCache
from paceline.heads.frozen_model import FrozenTarget, Texts, products
from paceline.heads.layouts import write_json
from paceline.heads.options import TEXTS_PER_FILE, CachedTextOptions
from paceline.heads.trainer import LOG_STEPS, Progress, Trainer


def objective(
    network: TrainableHead, texts: Texts, options: EagleTraining, *, head: Tensor, vocabulary: DraftVocab
) -> Tensor:
    """Return the loss of a batch of sequences, a scalar. ``head`` [V, H] is the target's output layer."""
    places = torch.ones_like(texts.tokens, dtype=torch.bool) if texts.counted is None else texts.counted
    last = texts.last[places].float()
    probs, inside = target_probs(last, head, vocabulary)
    rows = (places.flatten().cumsum(0) - 1).view_as(places)  # of a counted position among them
    first, second, total = options.feature_weight, options.ce_weight, last.new_zeros(())
    if network.config.version == 3:
        first, second = 0.0, 1.0
    for index, (hidden, ahead) in enumerate(passes(network, texts, options.passes(network.config.version))):
        here = places[:, ahead:]
        at, hidden = rows[:, ahead:][here], hidden[here]
        weights = inside[at].float()
        losses = LOSSES[options.loss](network.logits(hidden).float(), probs[at])
        loss = second * (losses * weights).sum() / weights.sum().clamp(min=1)
        if first:
            loss = loss + first * F.smooth_l1_loss(hidden.float(), last[at])
        total = total + options.ttt_decay**index * loss
    return total


def cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """logits [..., U] of the head, probs [..., U] of the target -> [...]"""
    return -(probs * F.log_softmax(logits, -1)).sum(-1)


def overlap(logits: Tensor, probs: Tensor) -> Tensor:
    """Return the rate at which `Reject` accepts a draft: 1 less the total variation distance. -> [...]"""
    return torch.minimum(logits.softmax(-1), probs).sum(-1)


def negative_log_acceptance(logits: Tensor, probs: Tensor) -> Tensor:
    """The likelihood loss of LK (arXiv 2602.23881): the negative logarithm of the acceptance rate."""
    return -overlap(logits, probs).clamp(min=1e-5).log()


def lk_hybrid(logits: Tensor, probs: Tensor) -> Tensor:
    """The hybrid loss of LK (arXiv 2602.23881): the divergence of Kullback and Leibler where little would be accepted,
    the total variation distance where much would be; the weight falls with e to the power of -3 times the rate.
    """
    rate = overlap(logits, probs)
    weight = torch.exp(-3.0 * rate.detach())
    divergence = cross_entropy(logits, probs) + torch.xlogy(probs, probs).sum(-1)
    return weight * divergence + (1 - weight) * (1 - rate)


LOSSES = {"ce": cross_entropy, "nla": negative_log_acceptance, "lk_hybrid": lk_hybrid}


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
def target_probs(last: Tensor, head: Tensor, vocabulary: DraftVocab) -> tuple[Tensor, Tensor]:
    """Return the target's distribution over the drafted ids [..., U], and whether its best id is one of them [...].
    last [..., H]
    """
    logits = F.linear(last, head).float()
    if len(vocabulary.ids) == vocabulary.size:
        return logits.softmax(-1), torch.ones(last.shape[:-1], dtype=torch.bool, device=last.device)
    return logits[..., vocabulary.ids].softmax(-1), vocabulary.mask[logits.argmax(-1)]


@torch.no_grad()
def acceptance(
    network: TrainableHead, texts: Texts, *, depth: int, head: Tensor, vocabulary: DraftVocab, skip: int
) -> list[float]:
    """Return the share of positions from ``skip`` on at which drafts 1, 2, ... are all the target's greedy token.

    On sequences that the target wrote greedily this is the acceptance of greedy chains that start at each position.

    Raises:
        ConfigurationError: no position qualifies.
    """
    parts = [text_part(texts, index, 8) for index in range(-(-len(texts.tokens) // 8))]
    agreements = [_agreements(network, part, depth, head=head, vocabulary=vocabulary) for part in parts]
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


def _agreements(network: TrainableHead, texts: Texts, count: int, *, head: Tensor, vocabulary: DraftVocab) -> Tensor:
    """Return whether drafts up to this pass were all right, [b, passes, places] bool."""
    choices = F.linear(texts.last.float(), head).argmax(-1)
    size = texts.tokens.shape[1] - count
    standing = torch.ones(len(texts.tokens), size, dtype=torch.bool, device=choices.device)
    rows = []
    for hidden, ahead in passes(network, texts, count):
        drafts = vocabulary.ids[network.logits(hidden).argmax(-1)]
        standing = standing & (drafts[:, :size] == choices[:, ahead : ahead + size])
        rows.append(standing)
    return torch.stack(rows, 1)


def text_part(texts: Texts, index: int, rows: int) -> Texts:
    """Return part ``index`` of the sequences, ``rows`` of them."""
    return texts.part(slice(index * rows, (index + 1) * rows))


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
    """Load a trained head to continue its training.

    Raises:
        CheckpointError: it has its own embedding, which this training does not support.
    """
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

_MEASURES = 10  # per run, evenly spaced


def muon(matrices: Sequence[Tensor], rate: float) -> torch.optim.Muon:
    """Create Muon (Jordan et al., 2024), its updates scaled to AdamW's at the same rate (Liu et al., arXiv
    2502.16982).
    """
    return torch.optim.Muon(matrices, rate, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw")


class Corpus(Protocol):
    """Batches of `TEXTS_PER_FILE` sequences with the target's hidden states, by number: `FeatureCache` or another
    source.

    key     identifies these sequences
    length  tokens of a sequence, on average
    """

    key: str

    @property
    def length(self) -> float: ...

    def batch(self, number: int) -> Texts: ...

    def eval_texts(self) -> Texts: ...


class EagleTrainer(Trainer):
    """Trains a head in place; ``measure`` is logged at intervals.

    head        [V, H], the target's output layer
    vocabulary  ids that the head drafts

    Raises:
        ConfigurationError: the folder holds the state of a run with another head, target, other data or options.
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
    ) -> None:
        self.network, self._corpus, self._training = network, corpus, options
        self._measure, self._head, self._vocabulary = measure, head, vocabulary
        parameters = dict(network.named_parameters())
        matrices = {name: p for name, p in parameters.items() if p.dim() == 2 and not name.startswith("lm_head")}
        vectors = [p for name, p in parameters.items() if name not in matrices]
        rate = options.learning_rate
        super().__init__(
            options,
            parameters=parameters,
            optimizers=[muon(list(matrices.values()), rate), torch.optim.AdamW(vectors, rate, betas=(0.9, 0.98))],
            steps=math.ceil(options.tokens / (options.batch_size * corpus.length)),
            folder=folder,
            key={
                **asdict(network.config),
                "corpus": corpus.key,
                "drafted ids": hashlib.sha256(vocabulary.ids.cpu().numpy().tobytes()).hexdigest()[:16],
                "start": network.start,
            },
        )

    def rate(self) -> float:
        return min(1.0, (self.step + 1) / 20) * (0.02 + 0.49 * (1 + math.cos(math.pi * self.step / self.steps)))

    def batches(self) -> Iterator[Texts]:
        rows = self._training.batch_size
        texts: Texts | None = None
        while self.step < self.steps:
            number, index = divmod(self.step, TEXTS_PER_FILE // rows)
            if texts is None or not index:
                texts = self._corpus.batch(number)
            yield text_part(texts, index, rows)

    def backward(self, batch: Texts) -> list[float]:
        with products(self._training.precision, self._training.device):
            loss = objective(self.network, batch, self._training, head=self._head, vocabulary=self._vocabulary)
        loss.backward()
        return [float(loss.detach())]

    def log_row(self, losses: Sequence[float]) -> dict[str, object]:
        row: dict[str, object] = {"loss": round(self.loss, 4)}
        every = max(LOG_STEPS, self.steps // _MEASURES // LOG_STEPS * LOG_STEPS)
        if self._measure is not None and (self.step % every == 0 or self.step == self.steps):
            row["greedy chains"] = [round(share, 4) for share in self._measure(self.network)]
        return row


MEASURED = "acceptance.json"


def train(
    target: Path,
    stream: np.ndarray,
    head: EagleHeadOptions,
    *,
    texts: CachedTextOptions,
    options: EagleTraining,
    work: Path,
    out: Path,
    report: Progress,
) -> list[float] | None:
    """Train a head and write it to ``out`` in bfloat16, with acceptance.json; None if the time limit ended the run.

    stream [n], token ids end to end. Returns the share of positions at which chains of 1, 2, ... drafts are all right.
    """
    sizes = ModelConfig.from_pretrained(target)
    check(head, texts, sizes)
    frozen, network, vocabulary = _begin(target, stream, head, sizes=sizes, options=options)
    features = FeatureCache(frozen, stream, texts, folder=work / "states")
    eval_texts, output = features.eval_texts(), frozen.output.detach()

    def measure(network: TrainableHead) -> list[float]:
        skip = texts.prompt_length
        return acceptance(network, eval_texts, depth=head.depth, head=output, vocabulary=vocabulary, skip=skip)

    trainer = EagleTrainer(network, features, options, head=output, vocabulary=vocabulary, folder=work, measure=measure)
    if not trainer.run(report):
        return None
    shares = measure(network)
    write(out, network, vocabulary, shares=shares)
    return shares


def _begin(
    target: Path, stream: np.ndarray, head: EagleHeadOptions, *, sizes: ModelConfig, options: EagleTraining
) -> tuple[FrozenTarget, TrainableHead, DraftVocab]:
    """Return the target, and the head before the first step: fresh, or one to continue."""
    if head.start is not None:
        found = checkpoint.load(head.start, sizes)
        frozen = FrozenTarget(target, found.config.layers, precision=options.precision, device=options.device)
        vocabulary = DraftVocab(found.weights.get("ids", torch.arange(sizes.vocab_size)), sizes.vocab_size)
        return frozen, continued(found, frozen, where=head.start), vocabulary.to(options.device)
    layers = head.layers or (default_layers(sizes.num_layers) if head.version == 3 else ())
    frozen = FrozenTarget(target, layers, precision=options.precision, device=options.device)
    counts = torch.from_numpy(np.bincount(stream, minlength=sizes.vocab_size))
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
    """Raise ConfigurationError, or CheckpointError for an unknown version, if the target does not support such a
    head.
    """
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
    """Write a head in bfloat16 and its measured acceptance."""
    state = network.state_dict()
    weights: dict[str, Tensor] = {name: x.detach().to("cpu", torch.bfloat16) for name, x in state.items()}
    if network.config.version == 3:
        weights["ids"] = vocabulary.ids.cpu()
    checkpoint.save(out, Checkpoint(network.config, weights))
    write_json(out / MEASURED, {"greedy chains": [round(share, 4) for share in shares]})
