"""Heads that the speculators library writes, in a separate environment: they draft what its own modules draft.

Block heads (DFlash, DFlash 2, DSpark) and an MTP layer, in every round; and a file of hidden states.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import AutoDrafter, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.decoder.steps import prefill
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.heads.features import FeatureFiles
from paceline.heads.frozen_model import FrozenTarget
from paceline.heads.options import TEXTS_PER_FILE
from tests.decoder.tiny import Workshop, fresh, network
from tests.draft.block_heads import accepted, rounds
from tests.draft.random_heads import rounds as chain_rounds
from tests.sampled import run, texts

HERE = Path(__file__).parent
PYTHON = os.environ.get("SPECULATORS_PYTHON", "")

needs_speculators = [
    pytest.mark.speculators,
    pytest.mark.skipif(not PYTHON, reason="speculators is not here; `make test-heads` installs it"),
]
"""Marks of a module of tests: ``pytestmark = needs_speculators``."""


def run_script(script: Path, *arguments: str | Path) -> None:
    """Run a script with the interpreter that has speculators; raises with its output where it fails."""
    command = [PYTHON, "-P", str(script), *map(str, arguments)]  # nothing is imported from here
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert result.returncode == 0, f"{script.name} failed:\n{result.stdout}\n{result.stderr}"


pytestmark = needs_speculators

PROMPT, NEW, STREAMS = [(7 * i) % 80 for i in range(21)], 24, [0, 2, 3]
CASES = (
    "dflash", "dflash, some ids", "dflash, anchor", "dflash, causal", "dflash2", "dspark, vanilla", "dspark, gated",
    "dspark, rnn", "dspark, some ids",
)  # fmt: skip


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the target, and a head for each case."""
    folder = tmp_path_factory.mktemp("heads")
    model = network(layers=4)
    model.save_pretrained(folder / "target")
    target = fresh(folder / "target", backend="eager", amp="f32")
    text = torch.tensor(texts(run(target, [PROMPT], max_new_tokens=NEW))[0])
    with torch.no_grad():
        streams = model(text[None], output_hidden_states=True).hidden_states
    given = {
        "text": text,
        "streams": torch.tensor(STREAMS),
        "states": torch.cat([streams[i][0] for i in STREAMS], -1).contiguous(),
        "embedding": model.get_input_embeddings().weight.detach().clone(),
        "head": model.get_output_embeddings().weight.detach().clone(),
    }
    save_file(given, folder / "text.safetensors")
    run_script(HERE / "write_block_heads.py", folder / "text.safetensors", folder)
    return folder


@pytest.fixture(scope="module")
def target(blocks: Path) -> SamplingDecoder:
    return fresh(blocks / "target", backend="eager", amp="f32")


@pytest.mark.parametrize("case", CASES)
def test_every_round_equals_speculators(blocks: Path, target: SamplingDecoder, case: str) -> None:
    oracle = load_file(blocks / case / "oracle.safetensors")
    (blocks / case / "oracle.safetensors").unlink()  # only the head's own files are read
    made = DFlashDrafter.from_pretrained(blocks / case, target, oracle["drafts"].shape[1])
    text, own = rounds(made, target, PROMPT, NEW)
    start, counts, wanted = len(PROMPT) + 1, [], []
    for drafts, logits in own:
        counts.append(accepted(text, start, drafts))
        theirs = oracle["drafts"][start - 2]  # after the token at position start - 1
        wanted.append(accepted(text, start, theirs.tolist()))
        torch.testing.assert_close(logits, oracle["logits"][start - 2], rtol=1e-4, atol=1e-4)
        assert drafts == theirs.tolist()
        start += counts[-1] + 1
    assert counts == wanted and start >= len(text) - 1


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speculators")
    run_script(HERE / "written" / "mtp.py", folder)
    return folder


def test_mtp_logits_equal_speculators_step_by_step(mtp: Path, compile_cache: None) -> None:
    expected: dict[str, Any] = json.loads((mtp / "expected.json").read_text())
    target = fresh(mtp / "target")
    head = AutoDrafter.from_pretrained(mtp / "head", target, k=3).head  # type: ignore[attr-defined]
    bucket = target.bucket_for(target.n_positions)
    for one in expected["rounds"]:
        text = one["text"]
        states = prefill(target, 0, text[:-1], reads=head.reads)[1]
        assert states is not None
        row, last = torch.zeros(1, dtype=torch.int32), torch.tensor([len(text) - 2], dtype=torch.int32)
        place = head.place(row, len(text) - 1, bucket)
        hidden = head.read(torch.tensor([text[1:]]).int(), states.unsqueeze(0), place, last=last)
        for index, (token, logits) in enumerate(zip(one["drafts"], one["logits"], strict=True)):
            assert torch.allclose(head.logits(hidden)[0, 0], torch.tensor(logits), atol=1e-4)
            hidden = head.next(torch.tensor([[token]]).int(), hidden, head.place(last + 1 + index, 1, bucket))
    text, forward = expected["text"], torch.tensor(expected["forward"])
    states = prefill(target, 0, text[: len(forward)], reads=head.reads)[1]
    assert states is not None
    tokens = torch.tensor([text[1 : len(forward) + 1]]).int()
    place = head.place(torch.zeros(1, dtype=torch.int32), len(forward), bucket)
    for position in range(len(forward)):
        hidden = head.read(tokens, states.unsqueeze(0), place, last=torch.tensor([position]).int())
        assert torch.allclose(head.logits(hidden)[0, 0], forward[position], atol=1e-4)


def test_mtp_rounds_equal_a_simulation_with_its_modules(mtp: Path, compile_cache: None) -> None:
    expected: dict[str, Any] = json.loads((mtp / "expected.json").read_text())
    target = fresh(mtp / "target")
    generator = SpeculativeGenerator(str(mtp / "head"), target, k=3)
    prompt = expected["rounds"][0]["text"][:-1]
    text, counts = chain_rounds(generator, prompt, len(expected["text"]) - len(prompt))
    assert text == expected["text"], "the target's own greedy text"
    assert counts[: len(expected["accepted"])] == expected["accepted"]
    assert 0 < sum(expected["accepted"]) < 3 * len(expected["accepted"])


def test_states_of_speculators_own_writer(workshop: Workshop, tmp_path: Path) -> None:
    run_script(HERE / "written" / "states.py", tmp_path / "hs_0.safetensors")
    for index in range(1, TEXTS_PER_FILE + 1):
        shutil.copy(tmp_path / "hs_0.safetensors", tmp_path / f"hs_{index}.safetensors")
    target = FrozenTarget(workshop.checkpoint(), (0, 1, 2))
    batch = FeatureFiles(target, tmp_path, longest=24, measured=1).batch(0)
    states = torch.randn(12, 4, 32, generator=torch.Generator().manual_seed(0))
    assert batch.tokens[0].tolist() == list(range(5, 17))
    torch.testing.assert_close(batch.streams[0].float(), states[:, :3].flatten(1), rtol=0.07, atol=0.07)
    torch.testing.assert_close(batch.last[0].float(), target.normed(states[:, 3]), rtol=0.1, atol=0.1)
