"""Tests out of a checkout of `transformers`, made to run against `HuggingFaceGenerationAdapter`; no tests.

Nothing of them is changed but what a test of a model says to the mixin: which classes, which inputs, and what
attentions, hidden states and a cache are there. Models and tokenizers of the hub are tiny ones of
`tests.huggingface.tiny_models`.
"""

from __future__ import annotations

import re
import sys
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from paceline.huggingface.cache import SlotCache
from tests.huggingface.tiny_models import config_for

MIXIN = "GenerationTesterMixin"
ROWS, COLUMNS = 4, 7


def version_of(checkout: Path) -> str:
    found = re.search(r'__version__ = "([^"]+)"', (checkout / "src" / "transformers" / "__init__.py").read_text())
    assert found, f"{checkout} is no checkout of transformers"
    return found[1]


def modules_of(checkout: Path, config: pytest.Config) -> dict[str, ModuleType]:
    """The modules in tests/generation, by their classes with tests. Its marks become known to pytest."""
    helpers = checkout / "src" / "transformers" / "testing_utils.py"
    files = [helpers, *(path for path in (checkout / "tests").glob("**/*.py") if "models" not in path.parts)]
    for mark in {mark for path in files for mark in re.findall(r"mark\.(\w+)", path.read_text())}:
        config.addinivalue_line("markers", f"{mark}: of transformers")
    names = sorted(path.stem for path in (checkout / "tests" / "generation").glob("test_*.py"))
    with _our_tests_away(checkout):
        modules = [import_module(f"tests.generation.{name}") for name in names]
    return {
        name: module
        for module in modules
        for name, kind in vars(module).items()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and names_in(kind)
    }


def names_in(kind: type) -> list[str]:
    return list(unittest.TestLoader().getTestCaseNames(kind))  # type: ignore[arg-type]  # a mixin is no TestCase yet


@contextmanager
def _our_tests_away(checkout: Path) -> Iterator[None]:
    """The package `tests` is the checkout's for a while."""

    def current() -> dict[str, Any]:
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "tests"}

    ours = current()
    for name in ours:
        del sys.modules[name]
    sys.path.insert(0, str(checkout))
    try:
        yield
    finally:
        sys.path.remove(str(checkout))
        for name in current():
            del sys.modules[name]
        sys.modules.update(ours)


class Inputs:
    """Prompts of unequal length, padded on the left; what the mixin calls a model tester."""

    seq_length = COLUMNS

    def prepare_config_and_inputs_for_common(self) -> tuple[PretrainedConfig, dict[str, Tensor]]:
        config = config_for(99, bos_token_id=1, eos_token_id=2, pad_token_id=0)
        mask = torch.ones(ROWS, COLUMNS, dtype=torch.int64)
        for row in range(ROWS):
            mask[row, :row] = 0
        return config, {"input_ids": torch.randint(3, 99, (ROWS, COLUMNS)) * mask, "attention_mask": mask}


def of_mixin(mixin: type, model: type) -> type[unittest.TestCase]:
    """The mixin's tests for a class of models."""

    class OfModel(mixin, unittest.TestCase):  # type: ignore[misc, valid-type]
        all_generative_model_classes = (model,)
        has_attentions = True
        model_tester = Inputs()

        def _check_attentions_for_generate(self, *, attentions: object, **_: object) -> None:
            self.assertIsNone(attentions)

        def _check_hidden_states_for_generate(self, *, hidden_states: object, **_: object) -> None:
            self.assertIsNone(hidden_states)

        def _check_past_key_values_for_generate(
            self, batch_size: int, past_key_values: SlotCache, seq_length: int, config: PretrainedConfig
        ) -> None:
            self.assertIsInstance(past_key_values, SlotCache)
            self.assertEqual((past_key_values.batch_size, past_key_values.get_seq_length()), (batch_size, seq_length))

        def _check_caches_are_equal(self, cache1: SlotCache, cache2: SlotCache) -> None:
            self.assertIs(cache1.decoder, cache2.decoder)
            self.assertEqual(cache1.mask.tolist(), cache2.mask.tolist())

    return OfModel
