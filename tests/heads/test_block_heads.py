"""DFlash, DFlash 2 and DSpark heads that speculators writes draft what its own modules draft, in every round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.auto import SamplingDecoder
from paceline.draft.dflash.drafter import DFlashDrafter
from tests.decoder.tiny import fresh, network
from tests.draft.block_heads import accepted, rounds
from tests.heads.speculators import needs_speculators, run_script
from tests.sampled import run, texts

pytestmark = needs_speculators

PROMPT, NEW, STREAMS = [(7 * i) % 80 for i in range(21)], 24, [0, 2, 3]
CASES = (
    "dflash", "dflash, some ids", "dflash, anchor", "dflash, causal", "dflash2", "dspark, vanilla", "dspark, gated",
    "dspark, rnn", "dspark, some ids",
)  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    run_script(Path(__file__).with_name("write_block_heads.py"), folder / "text.safetensors", folder)
    return folder


@pytest.fixture(scope="module")
def target(written: Path) -> SamplingDecoder:
    return fresh(written / "target", backend="eager", amp="f32")


@pytest.mark.parametrize("case", CASES)
def test_every_round_equals_speculators(written: Path, target: SamplingDecoder, case: str) -> None:
    oracle = load_file(written / case / "oracle.safetensors")
    (written / case / "oracle.safetensors").unlink()  # only the head's own files are read
    made = DFlashDrafter.from_pretrained(written / case, target, oracle["drafts"].shape[1])
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
