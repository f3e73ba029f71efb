"""The values of a round cannot be changed by those they are handed to."""

from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from paceline.core.types import PAD, Accepted, Commit, Proposal, RoundLimits, SamplingTensors

ONE = torch.zeros(1, 1, dtype=torch.int32)
VALUES = [Commit(ONE, ONE[0], ONE[0]), Proposal(ONE), Accepted(ONE, ONE[0], ONE[0]), SamplingTensors(ONE, ONE)]


@pytest.mark.parametrize("value", [*VALUES, RoundLimits([1], 1)], ids=lambda v: type(v).__name__)
def test_a_value_is_frozen_and_takes_no_new_fields(value: object) -> None:
    name = fields(value)[0].name  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        setattr(value, name, None)
    with pytest.raises((AttributeError, TypeError)):
        value.extra = 1  # type: ignore[attr-defined]


def test_pad_is_not_a_token_id() -> None:
    assert PAD < 0


def test_a_proposal_defaults_to_a_chain_without_probabilities() -> None:
    assert Proposal(ONE).parents is None
    assert Proposal(ONE).draft_probs is None
