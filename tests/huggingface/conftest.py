"""A tiny network as a model of transformers and as a decoder with the adapter, shared by all tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from paceline import HuggingFaceGenerationAdapter
from paceline.auto import SamplingDecoder
from tests.fakes_models import V, load, network, saved

WORDS = {"<unk>": 0, **{f"w{index}": index for index in range(1, V)}}


@dataclass
class Both:
    """The judge, what is judged, and a draft that is right often and wrong often."""

    theirs: LlamaForCausalLM
    ours: HuggingFaceGenerationAdapter
    decoder: SamplingDecoder
    draft: SamplingDecoder
    folder: Path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    root = tmp_path_factory.mktemp("models")
    theirs, other = network(), network()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    folder = saved(theirs, root / "target", words=WORDS)
    decoder, draft = load(folder, slots=6), load(saved(other, root / "draft"), slots=6)
    return Both(theirs, HuggingFaceGenerationAdapter(decoder), decoder, draft, folder)
