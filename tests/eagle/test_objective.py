"""The objective of a head, and the acceptance it is measured by, against plain references."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from paceline.core.errors import ConfigurationError
from paceline.eagle.config import EagleTraining
from paceline.eagle.network import TrainableHead
from paceline.eagle.train import acceptance, objective
from paceline.heads.checkpoint import DraftVocab
from paceline.heads.frozen_model import Texts
from paceline.heads.losses import LOSSES, target_probs
from tests.decoder.tiny import VOCABULARY, Workshop
from tests.eagle.heads import NEWER, PARALLEL, Plain, config, random_head
from tests.eagle.lessons import output, parts


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize(
    ("version", "drafted", "changes"),
    [(1, VOCABULARY, {}), (3, 60, {}), (3, VOCABULARY, {}), (3, 60, NEWER), (3, 60, PARALLEL)],
)
def test_the_objective_equals_that_of_the_papers(
    workshop: Workshop, tmp_path: Path, version: int, drafted: int, changes: dict[str, object], every: bool
) -> None:
    """Place by place over plain recomputed paths: 0.8 to the power of the pass, cross-entropy over the drafted ids
    where the target's best is one of them, and for version 1 smooth L1 on the next hidden state. Where not every place
    counts, the means are of those that do.
    """
    target = workshop.decoder(slots=1)
    frozen, corpus, _, _ = parts(workshop, tmp_path, 3)
    made = random_head(
        config(target.config, version, **({"draft_vocab_size": drafted} if version == 3 else {}), **changes)
    )
    vocabulary = DraftVocab(made.weights["ids"] if version == 3 else torch.arange(VOCABULARY), VOCABULARY)
    reference = Plain(made, frozen.embedding, output(frozen))
    network = TrainableHead(made.config, frozen.embedding, output(frozen) if version == 1 else None)
    network.load_state_dict({name: x for name, x in made.weights.items() if name != "ids"})
    whole = corpus.batch(0)
    counted = torch.rand(whole.tokens[:2].shape, generator=torch.Generator().manual_seed(0)) < (2.0 if every else 0.4)
    texts = Texts(whole.tokens[:2], whole.last[:2], whole.streams[:2], None if every else counted)
    size, passes, wanted = texts.tokens.shape[1], 3, 0.0
    for number in range(passes):
        surprises, errors = [], []
        for row, (tokens, last, streams) in enumerate(
            zip(texts.tokens, texts.last.float(), texts.streams.float(), strict=True)
        ):
            real = last if version == 1 else streams
            for place in range(size - 1 - number):
                if not counted[row, place + 1 + number]:
                    continue
                hidden = reference.hidden(real[: place + 1], tokens[1 : place + 2 + number].tolist())
                logits = last[place + 1 + number] @ output(frozen).T
                errors.append(F.smooth_l1_loss(hidden, last[place + 1 + number]))
                if int(logits.argmax()) in vocabulary.ids.tolist():
                    distribution = logits[vocabulary.ids].softmax(-1)
                    surprises.append(-(distribution * reference.scores(hidden).log_softmax(-1)).sum())
        loss = torch.stack(surprises).mean()
        wanted += 0.8**number * float(loss if version == 3 else 0.1 * loss + torch.stack(errors).mean())
    found = objective(
        network, texts, EagleTraining(tokens=1, ttt_steps=passes), head=output(frozen), vocabulary=vocabulary
    )
    assert float(found.detach()) == pytest.approx(wanted, rel=1e-3)
    assert EagleTraining(tokens=1).passes(3) == 7, "as the paper's"


def test_lk_losses_optimise_the_acceptance_rate() -> None:
    """By the formulas of arXiv 2602.23881, place by place; both are least where the head is the target."""
    generator = torch.Generator().manual_seed(0)
    logits, wanted = torch.randn(4, 7, generator=generator) * 2, torch.randn(4, 7, generator=generator).softmax(-1)
    wanted[0, :3], logits[1] = 0.0, wanted[1].log()
    wanted[0] /= wanted[0].sum()
    for place, (scores, p) in enumerate(zip(logits, wanted, strict=True)):
        q = scores.softmax(-1)
        rate = sum(min(float(x), float(y)) for x, y in zip(p, q, strict=True))
        divergence = sum(float(x * (x / y).log()) for x, y in zip(p, q, strict=True) if x > 0)
        share = math.exp(-3 * rate)
        hybrid = share * divergence + (1 - share) * (1 - rate)
        assert float(LOSSES["nla"](logits, wanted)[place]) == pytest.approx(-math.log(rate), abs=1e-5)
        assert float(LOSSES["lk_hybrid"](logits, wanted)[place]) == pytest.approx(hybrid, abs=1e-5)
    assert all(float(LOSSES[name](logits, wanted)[1]) == pytest.approx(0, abs=1e-5) for name in ("nla", "lk_hybrid"))
    assert set(LOSSES) == {"ce", "nla", "lk_hybrid"}, "those that `EagleTraining` takes"


def test_chain_acceptance_is_measured_where_all_positions_count(workshop: Workshop, tmp_path: Path) -> None:
    """Texts that are cut to the counted positions, and full ones with a mask of them, have the same shares."""
    frozen, corpus, network, vocabulary = parts(workshop, tmp_path, 3)
    texts, depth, begin, end = corpus.batch(0), 3, 9, 20
    given = {"depth": depth, "head": output(frozen), "vocabulary": vocabulary}
    counted = torch.zeros(texts.tokens.shape, dtype=torch.bool)
    counted[:, begin:end] = True
    some = Texts(texts.tokens, texts.last, texts.streams, counted)
    short = Texts(texts.tokens[:, :end], texts.last[:, :end], texts.streams[:, :end])
    assert acceptance(network, some, skip=0, **given) == acceptance(network, short, skip=begin, **given)
    assert acceptance(network, some, skip=0, **given) != acceptance(network, texts, skip=begin, **given)
    counted[:, begin + depth :] = False
    with pytest.raises(ConfigurationError, match="space for 3 draft tokens"):
        acceptance(network, some, skip=0, **given)


def test_distributions_over_a_part_of_the_vocabulary_are_renormalised() -> None:
    vocabulary = DraftVocab.frequent(torch.tensor([3, 9, 1, 9, 0, 4]), 3)
    assert vocabulary.ids.tolist() == [1, 3, 5] and vocabulary.offsets.tolist() == [1, 2, 3]
    assert vocabulary.mask.tolist() == [False, True, False, True, False, True]
    head, last = torch.eye(6), torch.tensor([[[0.0, 1, 2, 0, 0, 0], [0, 0, 0, 5, 0, 0]]])
    probs, inside = target_probs(last, head, vocabulary)
    assert inside.tolist() == [[False, True]]
    torch.testing.assert_close(probs[0, 0], F.softmax(torch.tensor([1.0, 0.0, 0.0]), 0))
