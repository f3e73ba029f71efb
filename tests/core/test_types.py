"""The values of a round cannot be changed by those they are handed to."""

from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from paceline.core.types import Accepted, Commit, Proposal, RoundLimits, SamplingTensors

ONE = torch.zeros(1, 1, dtype=torch.int32)
VALUES = [Commit(ONE, ONE[0], ONE[0]), Proposal(ONE), Accepted(ONE, ONE[0], ONE[0]), SamplingTensors(ONE, ONE)]


@pytest.mark.parametrize("value", [*VALUES, RoundLimits([1], 1)], ids=lambda v: type(v).__name__)
def test_a_value_is_frozen_and_takes_no_new_fields(value: object) -> None:
    name = fields(value)[0].name  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        setattr(value, name, None)
    with pytest.raises((AttributeError, TypeError)):
        value.extra = 1  # type: ignore[attr-defined]
