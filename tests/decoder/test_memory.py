"""Keys and values that this machine has no room for are rejected before anything is loaded."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline import AutoDecoder
from paceline.core.errors import ConfigurationError
from paceline.decoder import memory
from paceline.decoder.options import LoadOptions
from paceline.decoder.parallel.sharding import Shard
from tests.decoder.tiny import Workshop


def test_counted_bytes_equal_the_decoders_memory(workshop: Workshop) -> None:
    for amp in ("f32", "bf16"):
        decoder = workshop.decoder(amp=amp, slots=4)
        held = sum(side.nbytes for layer in decoder.body.caches for side in layer)
        assert memory.cache_bytes(Shard(decoder.config), decoder.options) == held


def test_a_cache_larger_than_memory_is_rejected_with_remedies(workshop: Workshop) -> None:
    told: list[int] = []
    with pytest.raises(ConfigurationError, match=r"of 1000000000 slots and .* this machine has .*batch_size"):
        AutoDecoder.from_pretrained(
            workshop.checkpoint(), backend="eager", batch_size=10**9, progress=lambda done, _all: told.append(done)
        )
    assert not told


@pytest.mark.parametrize(("said", "smaller"), [("1048576\n", True), ("max\n", False), (None, False)])
def test_a_container_memory_limit_applies(tmp_path: Path, said: str | None, smaller: bool) -> None:
    file = tmp_path / "memory.max"
    if said is not None:
        file.write_text(said)
    assert (memory.machine_bytes(file) == 1 << 20) == smaller
    assert memory.machine_bytes(file) <= memory.machine_bytes(tmp_path / "none")


def test_default_positions_are_as_many_as_fit_in_memory(
    workshop: Workshop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = workshop.decoder().config
    long = Shard(replace(trained, max_position_embeddings=1 << 20))
    load = LoadOptions(backend="eager", amp="f32")
    assert memory.fitting_options(long, load, 1 << 50).n_positions == 1 << 20 and not caplog.text
    whole = memory.cache_bytes(long, memory.fitting_options(long, load, 1 << 50))
    tables = (1 << 20) * trained.head_dim * 16
    assert memory.fitting_options(long, load, (whole + tables) // 2).n_positions == 1 << 18  # an eighth is spared
    endless = Shard(replace(trained, max_position_embeddings=10**12))
    found = memory.fitting_options(endless, load, whole + tables)
    assert 1 << 18 < found.n_positions < 1 << 20
    assert "all 1000000000000 positions of the model do not fit" in caplog.text
    assert "loaded for 262144; name another length with n_positions" in caplog.text
    assert memory.fitting_options(long, load, 0).n_positions == 2048  # `check_cache` refuses them
    monkeypatch.setattr(memory, "machine_bytes", lambda: 0)
    with pytest.raises(ConfigurationError, match="and this machine has 0"):
        AutoDecoder.from_pretrained(workshop.checkpoint(), backend="eager")
