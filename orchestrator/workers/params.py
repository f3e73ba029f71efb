"""What a caller may ask of a target in another process: `SamplingParams` without objects of the caller's process."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.errors import ConfigurationError
from paceline.engine.request import SamplingParams


def call_params(params: SamplingParams | None, overrides: Mapping[str, object]) -> SamplingParams:
    """``params`` with some fields replaced, checked here so that no worker sees what it could not do.

    Raises:
        SamplingError: a keyword that does not exist, or a wrong value.
        ConfigurationError: a field holds an object that cannot be sent to another process.
    """
    merged = SamplingParams.merge(params, overrides)
    for name in sorted(SamplingParams.in_process_fields()):
        if getattr(merged, name) is not None:
            raise ConfigurationError(
                f"{name} holds objects of this process, and the target runs in another one; leave it out (the target "
                "has its own tokenizer for stop_strings), or decode in this process with SpeculativeGenerator"
            )
    return merged
