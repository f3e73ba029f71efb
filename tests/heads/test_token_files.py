"""Files of token ids: what was written is read, and nothing is read as what it is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import ConfigurationError, StorageError
from paceline.decoder.token_files import HEADER_BYTES, append_tokens, read_tokens, write_tokens

LLAMA3 = 128_256


@pytest.mark.parametrize(("vocab_size", "width"), [(96, 2), (65_536, 2), (65_537, 4), (LLAMA3, 4)])
def test_ids_round_trip_in_the_width_of_the_vocabulary(tmp_path: Path, vocab_size: int, width: int) -> None:
    path, top = tmp_path / "a.bin", vocab_size - 1
    assert write_tokens(path, [[0, 5], np.array([[top, 1]]), []], vocab_size=vocab_size) == 4
    append_tokens(path, [7, top])
    assert path.stat().st_size == HEADER_BYTES + 6 * width and not list(tmp_path.glob("*.part"))
    for found in (read_tokens(path), read_tokens(path, vocab_size), read_tokens(path, dtype="uint32")):
        assert found.dtype == np.int32 and found.tolist() == [0, 5, top, 1, 7, top]


@pytest.mark.parametrize(
    ("written", "target", "said"),
    [
        (32_000, LLAMA3, "ids of 32 bits for a vocabulary of 128256, got 16"),
        (LLAMA3, 32_000, "target's vocabulary of 32000, got ids of one of 128256"),
    ],
)
def test_ids_of_another_vocabulary_are_rejected(tmp_path: Path, written: int, target: int, said: str) -> None:
    write_tokens(tmp_path / "a.bin", [[1, 2, 3, 4]], vocab_size=written)
    with pytest.raises(ConfigurationError, match=said):
        read_tokens(tmp_path / "a.bin", target)


def test_a_target_may_have_more_ids_than_its_tokenizer(tmp_path: Path) -> None:
    """Padded vocabularies are usual."""
    write_tokens(tmp_path / "a.bin", [[1, 2]], vocab_size=151_669)
    assert read_tokens(tmp_path / "a.bin", 151_936).tolist() == [1, 2]


def test_a_file_without_a_header_needs_an_explicit_dtype(tmp_path: Path) -> None:
    ids = np.arange(1, 9, dtype=np.uint16)
    path = tmp_path / "a.bin"
    ids.tofile(path)
    with pytest.raises(
        ConfigurationError, match=r"expected a header with the size.*give --data-dtype uint16 or uint32"
    ):
        read_tokens(path, 96)
    assert read_tokens(path, 96, dtype="uint16").tolist() == ids.tolist()
    for dtype, size, said in (
        ("uint32", 96, "ids of 16 bits for a vocabulary of 96, got 32"),
        ("uint16", LLAMA3, "ids of 32 bits for a vocabulary of 128256, got 16"),
        ("uint32", LLAMA3, "below the vocabulary size 128256, got 524295"),
        ("int8", 96, "dtype: expected one of uint16, uint32 for token ids, got 'int8'"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            read_tokens(path, size, dtype=dtype)


def test_damaged_token_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_tokens(path, [[1, 2]], vocab_size=96)
    whole = path.read_bytes()
    for raw, said in (
        (whole[:-1], "a whole number of 16-bit ids"),
        (whole[:8] + b"\x02" + whole[9:], "a known header of token ids, got version 2"),
        (whole[:10] + b"\x04" + whole[11:], "got version 1, 4 bytes per id and 96 ids"),
        (whole + b"\x61\x00", "below the vocabulary size 96, got 97"),
        (whole[:-2] + b"\x60\x00", "below the vocabulary size 96, got 96"),
    ):
        path.write_bytes(raw)
        with pytest.raises(ConfigurationError, match=said):
            read_tokens(path, 96)


def test_invalid_ids_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    for ids in ([96], [-1]):
        with pytest.raises(ConfigurationError, match="token ids of a vocabulary of 96"):
            write_tokens(path, [[1], ids], vocab_size=96)
    assert not list(tmp_path.iterdir()), "whole or not at all"
    path.write_bytes(b"\x01\x00")
    with pytest.raises(ConfigurationError, match="expected a header of token ids, got none; start the file"):
        append_tokens(path, [1])
    with pytest.raises(StorageError):
        write_tokens(tmp_path / "a.bin" / "b.bin", [[1]], vocab_size=96)


def test_a_file_named_like_a_partial_one_is_kept(tmp_path: Path) -> None:
    write_tokens(tmp_path / "own.part", [[1]], vocab_size=96)
    assert read_tokens(tmp_path / "own.part").tolist() == [1]
