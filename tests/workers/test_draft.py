"""A draft's worker for its targets: decoders that exist before the first call, and are reused."""

from __future__ import annotations

import errno
import json
import socket
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from paceline.core.errors import ConfigurationError
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import Commit, RoundLimits
from paceline.decoder.backends.eager import EagerBackend
from paceline.decoder.options import LoadOptions
from paceline.draft.model import ModelDrafter
from paceline.placement.lookahead import LookaheadDrafter
from paceline.placement.remote.channel import Address, listen
from paceline.placement.remote.drafter import DrafterContract, RemoteDrafter
from paceline.placement.remote.messages import Handshake
from paceline.placement.remote.reconnect import DrafterEndpoint
from paceline.placement.remote.server import DraftServer, UnpooledDrafters
from paceline.workers.draft import DraftPool, make_drafters
from tests.decoder.tiny import VOCABULARY, Workshop, save_pair
from tests.placement.faulty import SECRET, serving


def pool(workshop: Workshop, clients: int) -> DraftPool:
    shape = asdict(LoadOptions(amp="f32", n_positions=128))
    more = {"backend": "eager", "k": 4, "max_targets": clients, "targets": [str(workshop.checkpoint())]}
    return make_drafters({**shape, **more, "folder": str(workshop.checkpoint("draft"))})


def test_a_pool_never_outgrows_its_plan(workshop: Workshop) -> None:
    made = pool(workshop, 2)
    first, second = (made.acquire(Handshake(0, name, 1, VOCABULARY)) for name in "ab")
    assert isinstance(first, ModelDrafter) and isinstance(second, ModelDrafter)
    assert first.decoder is not second.decoder
    with pytest.raises(ConfigurationError, match="max_targets: expected at most 2 targets at a time"):
        made.acquire(Handshake(0, "c", 1, VOCABULARY))
    made.release(first)
    with pytest.raises(ConfigurationError, match="for the draft, as for target"):
        made.acquire(Handshake(0, "c", 2, VOCABULARY))
    third = made.acquire(Handshake(0, "c", 1, VOCABULARY - 1))
    assert isinstance(third, ModelDrafter) and third.decoder is first.decoder


def test_auto_drafts_the_lengths_of_the_drafts_own_backend(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagerBackend, "draft_lengths", (0, 1, 3))
    settings = asdict(LoadOptions(amp="f32", n_positions=128))
    settings |= {"backend": "eager", "folder": str(workshop.checkpoint("draft"))}
    for asked, drafts in (("auto", 3), (5, 5)):
        drafter = make_drafters({**settings, "k": asked}).acquire(Handshake(0, "a", 1, VOCABULARY))
        assert drafter.draft_shape.num_draft_tokens == drafts


@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_has_the_graphs_of_every_bucket_before_it_is_called(tmp_path: Path, ahead: bool) -> None:
    save_pair(tmp_path)
    file = tmp_path / "draft" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 300}))
    shape = asdict(LoadOptions(amp="f32", n_positions=300))
    more = {"backend": "eager", "k": 4, "draft_ahead": ahead, "targets": [str(tmp_path / "target")]}
    made = make_drafters({**shape, **more, "folder": str(tmp_path / "draft")})
    (decoder,) = made._free
    assert len(decoder.kv_buckets) > 1
    before = dict(decoder._steps)
    model = made.acquire(Handshake(0, "a", 1, VOCABULARY))
    one = torch.ones(1, dtype=torch.int32)
    for length in (1, 70, 124, 128, 200, 290):
        model.add_request(0, [3] * length)
        commit = Commit(torch.tensor([[7, -1, -1, -1, -1]], dtype=torch.int32), one, length * one)
        model.update(commit)
        model.propose(commit, sampling_tensors([Sampling()]), RoundLimits((4 * one).tolist(), length + 1))
        while isinstance(model, LookaheadDrafter) and not model.idle:
            model.work()
    assert decoder._steps == before


class FullOnce(socket.socket):
    """A listener that once finds no file to open for who calls."""

    full = True

    def accept(self) -> tuple[socket.socket, object]:
        if self.full:
            self.full = False
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_disconnect_frees_a_place_and_a_full_file_table_is_survived(workshop: Workshop, tmp_path: Path) -> None:
    address, terms = Address(path=str(tmp_path / "s")), DrafterContract(4, 1, VOCABULARY)
    listener = listen(address)
    with serving(FullOnce(fileno=listener.detach()), pool(workshop, 1)):
        for _ in range(3):
            with closing(RemoteDrafter(terms, DrafterEndpoint(address, SECRET))) as target:
                assert target.wait_until_up(20), target.health


def test_a_server_that_has_ended_can_be_stopped_again(tmp_path: Path) -> None:
    def nobody(_hello: Handshake) -> ModelDrafter:
        raise AssertionError("nobody calls")

    server = DraftServer(listen(Address(path=str(tmp_path / "s"))), SECRET, UnpooledDrafters(nobody))
    server.stop()
    server.run()
    server.stop()
