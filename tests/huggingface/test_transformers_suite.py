"""Tests of transformers themselves, where TRANSFORMERS_TESTS names a checkout of its repository: its wheel has none.

Which of them run, and why others do not, is in `tests.huggingface.transformers_tests`. One that leaves itself out
fails.
"""

from __future__ import annotations

import os
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from transformers import testing_utils

from paceline import HuggingFaceGenerationAdapter
from tests.huggingface.of_checkout import MIXIN, modules_of, names_in, of_mixin, version_of
from tests.huggingface.tiny_models import TinyDecoder, TinyGenerator, stand_ins
from tests.huggingface.transformers_tests import is_left_out, run_here, whole_classes

CHECKOUT = "TRANSFORMERS_TESTS"
HOW = (
    f"{CHECKOUT} names a checkout of transformers: git clone --depth 1 --branch v{transformers.__version__} "
    "https://github.com/huggingface/transformers, and pip install parameterized"
)
given = pytest.mark.skipif(CHECKOUT not in os.environ, reason=HOW)
pytestmark = [
    pytest.mark.filterwarnings("default"),  # they are used to warnings
    pytest.mark.filterwarnings("error:It is deprecated to return a value"),  # such a test has not run
]


@pytest.fixture(scope="module")
def theirs(pytestconfig: pytest.Config) -> Iterator[dict[str, ModuleType]]:
    """The checkout's modules in tests/generation, by their classes with tests."""
    checkout = Path(os.environ[CHECKOUT])
    versions = [version.split(".")[:2] for version in (version_of(checkout), transformers.__version__)]
    assert versions[0] == versions[1], f"{CHECKOUT} is of {version_of(checkout)}; {HOW}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing_utils, "torch_device", "cpu")
        patch.setattr(testing_utils, "is_flaky", once)
        yield modules_of(checkout, pytestconfig)


def once(*test: Callable[..., object], **_options: object) -> Any:
    """In place of a decorator that tries a test several times; bare, as it is used too, that one hides the test."""
    return test[0] if test else once


@given
def test_every_test_of_the_checkout_is_in_the_list(theirs: dict[str, ModuleType]) -> None:
    names = {kind: names_in(getattr(module, kind)) for kind, module in theirs.items()}
    whole = whole_classes()
    assert {kind: len(found) for kind, found in names.items() if kind in whole} == whole
    found = [f"{kind}.{one}" for kind, some in names.items() if kind not in whole for one in some]
    assert [name for name in found if name not in run_here() and not is_left_out(name)] == []


@given
@pytest.mark.parametrize("model", [TinyDecoder, TinyGenerator], ids=["decoder", "generator"])
@pytest.mark.parametrize("name", run_here())
def test_a_test_of_transformers_passes(
    theirs: dict[str, ModuleType], name: str, model: type[TinyDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, test = name.split(".")
    if kind not in theirs or test not in names_in(getattr(theirs[kind], kind)):
        pytest.skip(f"{transformers.__version__} has no such test")
    module = theirs[kind]
    case: Any = getattr(module, kind)
    if kind == MIXIN:
        case = of_mixin(case, HuggingFaceGenerationAdapter if test == "test_inherits_generation_mixin" else model)
    else:
        for asked, stand_in in stand_ins(model, Path(str(module.__file__))).items():
            monkeypatch.setattr(module, asked, stand_in)
    transformers.set_seed(0)  # some draw their inputs from Python's generator
    result = unittest.TestResult()
    case(test).run(result)
    for _, trace in [*result.errors, *result.failures]:
        pytest.fail(trace, pytrace=False)
    assert result.testsRun == 1 and not result.skipped, result.skipped


def test_no_test_of_transformers_is_listed_twice() -> None:
    assert len(set(run_here())) == len(run_here())
    assert not any(is_left_out(name) for name in run_here())
