"""The shard of a model that each rank has; it reads no other part of the files."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from paceline.core.errors import ConfigurationError
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.registry import family
from paceline.decoder.parallel.sharding import GQA, Layout, Shard, layout, padding
from paceline.decoder.weights import checkpoint, files
from tests.decoder import gguf_files
from tests.decoder.tiny import Workshop


def config(workshop: Workshop, **changes: object) -> ModelConfig:
    """4 query heads, 2 K/V heads of 8, 48 MLP columns, 96 ids."""
    return replace(ModelConfig.from_pretrained(workshop.checkpoint()), **changes)  # type: ignore[arg-type]


def test_k_v_heads_are_on_the_ranks_of_their_queries(workshop: Workshop) -> None:
    tiny = config(workshop)

    def heads(made: ModelConfig, degree: int, gqa: GQA) -> list[tuple[int, ...]]:
        return [Shard(made, Layout(degree, gqa), rank).key_heads for rank in range(degree)]

    assert heads(tiny, 2, GQA.SHARD_OVER_HEADS) == [(0,), (1,)]
    assert heads(tiny, 4, GQA.REPLICATED_HEADS) == [(0,), (0,), (1,), (1,)]
    assert heads(tiny, 4, GQA.ALL_GATHER_HEADS) == [(0,), (0,), (1,), (1,)]
    # Three queries share a head and a rank has two: no even share, so that every query gets a copy of its own.
    odd = replace(tiny, num_heads=12, num_kv_heads=4)
    assert heads(odd, 6, GQA.REPLICATED_HEADS)[:3] == [(0, 0), (0, 1), (1, 1)]


def test_heads_that_do_not_divide_are_padded_by_group(workshop: Workshop) -> None:
    """No rank has queries of two K/V heads in part: with three ranks a head of Llama-3-8B's, caches stay small."""

    def parts(heads: int, kv: int, degree: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        made = config(workshop, num_heads=heads, num_kv_heads=kv)
        shards = [Shard(made, layout(made, degree), rank) for rank in range(degree)]
        assert [query for shard in shards for query in shard.queries] == list(range(heads)), "each is computed once"
        assert {(shard.heads, len(shard.key_heads)) for shard in shards} == {
            (shards[0].heads, len(shards[0].key_heads))
        }
        for shard in shards:
            share = shard.heads // len(shard.key_heads)
            for place, query in enumerate(shard.queries):
                assert shard.key_heads[place // share] == query // (heads // kv)
        return [(tuple(shard.queries), shard.key_heads) for shard in shards]

    assert parts(32, 8, 24)[:4] == [((0, 1), (0,)), ((2, 3), (0,)), ((), (0,)), ((4, 5), (1,))]
    assert parts(64, 8, 24)[:4] == [((0, 1, 2), (0,)), ((3, 4, 5), (0,)), ((6, 7), (0,)), ((8, 9, 10), (1,))]
    assert parts(4, 2, 3) == [((0, 1), (0,)), ((2, 3), (1,)), ((), (1,))]  # one rank is left over
    assert parts(9, 9, 4)[2:] == [((6, 7, 8), (6, 7, 8)), ((), (8, 8, 8))]  # whole groups on a rank
    assert parts(12, 4, 8)[:2] == [((0, 1), (0,)), ((2,), (0,))]
    for heads, kv, degree in ((14, 2, 24), (12, 2, 8), (32, 8, 24), (40, 8, 24), (71, 1, 24), (6, 3, 4), (25, 5, 3)):
        parts(heads, kv, degree)


def test_padding_is_reported(workshop: Workshop) -> None:
    llama = config(workshop, num_heads=32, num_kv_heads=8, intermediate_size=14336, vocab_size=128256)
    assert padding(llama, 8) == padding(llama, 32) == {}
    assert padding(llama, 24) == {"attention heads": (32, 48), "columns of the MLP": (14336, 14352)}


def stored(workshop: Workshop, folder: Path, kind: str) -> Path:
    """A checkpoint of a kind, or one in another format."""
    if kind.startswith("GGUF"):
        return gguf_files.write(folder / "model.gguf", gguf_files.network(), GGMLQuantizationType[kind.split()[1]])
    if kind != "pickle":
        return workshop.checkpoint(kind=kind)
    shutil.copy(workshop.checkpoint() / "config.json", folder)
    torch.save(load_file(workshop.checkpoint() / "model.safetensors"), folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("kind", ["grouped", "biased", "llama 3", "odd", "pickle", "GGUF F32", "GGUF Q4_1"])
def test_concatenated_shards_equal_the_checkpoint(workshop: Workshop, tmp_path: Path, kind: str, degree: int) -> None:
    path = stored(workshop, tmp_path, kind)
    made = ModelConfig.from_pretrained(path)
    whole = checkpoint.load_weights(path, made, torch.float32)
    shards = [Shard(made, layout(made, degree), rank) for rank in range(degree)]
    parts = [checkpoint.load_weights(path, made, torch.float32, shard=shard) for shard in shards]
    for name, tensor in whole.items():
        spec = family("llama").tensors(made)[name]
        cut = shards[0].slice_of(spec)
        if cut is None:
            assert all(torch.equal(part[name], tensor) for part in parts)
            continue
        rebuilt = torch.full_like(tensor, torch.nan)
        for shard, part in zip(shards, parts, strict=True):
            mine, done = shard.slice_of(spec), 0
            assert mine is not None and part[name].shape[mine.dim] == mine.size == cut.size
            for (first, last), size in zip(mine.ranges, mine.sizes, strict=True):
                own = part[name].narrow(mine.dim, done, size)
                rebuilt.narrow(mine.dim, first, last - first).copy_(own.narrow(mine.dim, 0, last - first))
                assert not own.narrow(mine.dim, last - first, size - (last - first)).any(), "the rest is zeros"
                done += size
        assert torch.equal(rebuilt, tensor), name


def test_a_vocabulary_that_does_not_divide_is_padded_with_zeros(workshop: Workshop) -> None:
    shard = Shard(replace(config(workshop), vocab_size=97), Layout(4), 3)
    part = shard.slice_of(family("llama").tensors(shard.config)["lm_head.weight"])
    assert part is not None and (shard.ids, part.ranges, part.size) == (range(75, 100), ((75, 97),), 25)


@pytest.mark.parametrize("gqa", [GQA.SHARD_OVER_HEADS, GQA.ALL_GATHER_HEADS])
def test_a_rank_reads_only_its_shard_of_the_file(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, gqa: GQA) -> None:
    """Every number that leaves the file is counted; the ranks' sum is that of the file and what all must have."""
    path, made = workshop.checkpoint(), config(workshop)
    read: list[int] = []
    kind = files._SafetensorsFile
    for method in ("read", "read_range"):
        original = getattr(kind, method)

        def counted(self: object, *asked: object, original: object = original, **named: object) -> torch.Tensor:
            found: torch.Tensor = original(self, *asked, **named)  # type: ignore[operator]
            read.append(found.numel())
            return found

        monkeypatch.setattr(kind, method, counted)
    totals = []
    for rank in range(2):
        read.clear()
        checkpoint.load_weights(path, made, torch.float32, shard=Shard(made, Layout(2, gqa), rank))
        totals.append(sum(read))
    norms = sum(spec.shape[0] for name, spec in family("llama").tensors(made).items() if "norm" in name)
    everything = sum(tensor.numel() for tensor in load_file(path / "model.safetensors").values())
    assert totals == [(everything - norms) // 2 + norms] * 2


def test_parts_of_gathered_keys_must_be_even(workshop: Workshop) -> None:
    with pytest.raises(ConfigurationError, match="ranks can share evenly for 'all-gather-heads', got"):
        layout(config(workshop, num_heads=12, num_kv_heads=1, head_dim=8), 3, GQA.ALL_GATHER_HEADS)
