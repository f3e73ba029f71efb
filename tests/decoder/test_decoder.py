"""A loaded decoder: its options, its prompts in chunks, the borders of its cache, and who may use it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from paceline import SpeculativeGenerator
from paceline.core.errors import ConfigurationError, DecoderBusyError
from paceline.decoder import steps
from paceline.decoder.options import check_width
from tests.decoder.tiny import POSITIONS, VOCABULARY, Workshop, load, network
from tests.equality.settings import PROMPTS, plain, run, texts

# ---- options


@pytest.mark.parametrize(
    ("options", "kv_buckets", "chunks"),
    [
        ({}, (128,), (64, 128)),
        ({"n_positions": 100}, (100,), (64, 100)),
        ({"n_positions": [16, 32, 64]}, (16, 32, 64), (64,)),
        ({"n_positions": (128,), "context_length_estimate": 5}, (128,), (5,)),
        ({"context_length_estimate": [4, 32, 500]}, (128,), (4, 32, 128)),
        ({"n_positions": 1}, (1,), (1,)),
    ],
)
def test_decoder_has_the_given_buckets_and_chunks(
    workshop: Workshop, options: dict[str, object], kv_buckets: tuple[int, ...], chunks: tuple[int, ...]
) -> None:
    decoder = load(workshop.checkpoint(), **options)
    assert (decoder.options.kv_buckets, decoder.options.chunks) == (kv_buckets, chunks)
    assert decoder.n_positions == kv_buckets[-1]
    assert decoder.options.draft_chunks == (chunks if chunks[0] <= 16 else (16, *chunks))


def test_a_single_number_of_positions_gives_buckets_of_doubling_length(tmp_path: Path) -> None:
    model = network(layers=1)
    model.config.max_position_embeddings = 1000
    model.save_pretrained(tmp_path)
    assert load(tmp_path).options.kv_buckets == (128, 256, 512, 1000)
    assert load(tmp_path, n_positions=512).options.kv_buckets == (128, 256, 512)
    assert load(tmp_path, n_positions=513).options.kv_buckets == (128, 256, 512, 513)


@pytest.mark.parametrize("amp", ["f32", "bf16", "f16"])
def test_amp_sets_the_format_of_weights_and_cache(workshop: Workshop, amp: str) -> None:
    decoder = load(workshop.checkpoint(), amp=amp)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[amp]
    assert {p.dtype for p in decoder.body.parameters()} == {dtype}
    assert decoder.body.get_buffer("keys_1").dtype == dtype
    assert decoder.body.get_buffer("keys_1").shape == (1, 2, decoder.options.rows, 8)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"batch_size": 0}, ["batch_size", "got 0"]),
        ({"batch_size": "2"}, ["batch_size", "got '2'"]),
        ({"batch_size": True}, ["batch_size", "got True"]),
        ({"n_positions": True}, ["n_positions", "got True"]),
        ({"backend": ["eager"]}, ["backend: ", "got ['eager']", "eager, native"]),
        ({"n_positions": "64"}, ["n_positions", "ascending", "got '64'"]),
        ({"context_length_estimate": [8, 1.5]}, ["context_length_estimate", "ascending"]),
        ({"amp": None}, ["amp: ", "got None", "bf16, f16, f32"]),
        ({"n_positions": 0}, ["n_positions", "positive", "got 0"]),
        ({"n_positions": []}, ["n_positions", "ascending"]),
        ({"n_positions": [64, 64]}, ["n_positions", "ascending"]),
        ({"n_positions": [64, 32]}, ["n_positions", "ascending"]),
        ({"n_positions": POSITIONS + 1}, ["n_positions: ", "at most 128", "got 129", "max_position_embeddings"]),
        ({"n_positions": [64, 256]}, ["n_positions: ", "at most 128", "got 256"]),
        ({"context_length_estimate": -1}, ["context_length_estimate", "positive"]),
        ({"context_length_estimate": [8, 4]}, ["context_length_estimate", "ascending"]),
        ({"context_length_estimate": 0}, ["context_length_estimate", "positive"]),
        ({"amp": "fp16"}, ["amp: ", "got 'fp16'", "bf16, f16, f32"]),
        ({"backend": "tpu"}, ["backend: ", "got 'tpu'", "eager, native"]),
        ({"quantization": "int3"}, ["quantization: expected one of int8, fp8_e4m3", "got 'int3'"]),
        ({"quantization": "int8_per_tensor"}, ["got 'int8_per_tensor'; use 'int8', which"]),
        ({"quantization": "fp8_e5m2"}, ["got 'fp8_e5m2'; use 'fp8_e4m3', which"]),
        ({"quantization": "gguf"}, ["expected a GGUF file"]),
        (
            {"quantization": "q8_0", "backend": "neuron"},
            ["backend='neuron' multiplies with no blocks", "use 'int8', or"],
        ),
        ({"quantization": "q4_0"}, ["down_proj.weight: quantization: ", ", got 48; use ", "'int8'"]),
        ({"kv_cache_dtype": "int4"}, ["kv_cache_dtype: expected one of int8, fp8_e4m3", "got 'int4'"]),
        *(
            ({"kv_cache_dtype": "int8", "backend": name}, ["kv_cache_dtype='int8' asks for 8 bits; ", " eager, native"])
            for name in ("neuron", "xla", "neuron-native")
        ),
        ({"tp_degree": 0}, ["tp_degree: expected a number of ranks of at least 1, got"]),
        ({"tp_degree": 2, "backend": "native"}, ["tp_degree: expected 1 for backend='native'"]),
        ({"tp_degree": 4, "group_query_attention": "shard-over-heads"}, ["K/V heads divisible by tp_degree=4"]),
        ({"tp_degree": 2, "group_query_attention": "shard-over-batch"}, ["shard-over-batch"]),
        ({"tp_degree": 2, "group_query_attention": "by-magic"}, ["one of 'shard-over-heads', ", "got 'by-magic'"]),
    ],
)
def test_invalid_options_are_rejected_with_the_possible_values(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], parts: list[str]
) -> None:
    """Before anything is read, but for what depends on a matrix, and before any other process is started."""
    if options != {"quantization": "q4_0"}:
        monkeypatch.setattr("paceline.build.load_weights", None)
    monkeypatch.setattr("paceline.decoder.backends.eager.shared", None)
    with pytest.raises(ConfigurationError) as caught:
        load(workshop.checkpoint(), **options)
    for part in parts:
        assert part in str(caught.value)


def test_progress_is_reported_while_weights_are_read_with_one_thread(
    workshop: Workshop, restored_threads: None
) -> None:
    seen: list[tuple[int, int, int]] = []
    torch.set_num_threads(3)
    load(workshop.checkpoint(), progress=lambda done, of: seen.append((done, of, torch.get_num_threads())))
    assert seen == [(done, len(seen), 1) for done in range(1, len(seen) + 1)], "a small model"
    assert torch.get_num_threads() == 3


# ---- prompts in chunks


@pytest.mark.parametrize("chunks", [[1], [4, 8], [7], [64], [16, 128]])
def test_a_prompt_in_chunks_gives_the_logits_of_hugging_face(workshop: Workshop, chunks: list[int]) -> None:
    """With one kind of chunks at every length, and in every bucket."""
    model = LlamaForCausalLM.from_pretrained(workshop.checkpoint(), dtype=torch.float32)
    options = {"n_positions": [16, 32, 64, POSITIONS], "context_length_estimate": chunks, "batch_size": 2}
    decoder = load(workshop.checkpoint(), **options)
    text = torch.randint(VOCABULARY, (POSITIONS,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model(text[None]).logits[0]
    for length in range(1, POSITIONS + 1) if chunks == [4, 8] else (1, 7, 8, 9, 37, 100):
        for slot in (1, 0):
            made = steps.prefill(decoder, slot, text[:length].tolist())[0]
            torch.testing.assert_close(made[0, 0], expected[length - 1], rtol=1e-5, atol=2e-5)


# ---- who may use it


def test_a_decoder_serves_one_generation_at_a_time(workshop: Workshop) -> None:
    draft, target = workshop.pair()
    generator = SpeculativeGenerator(draft, target, k=2)
    known = plain(target, {})
    first = target.stream(PROMPTS, max_new_tokens=20)
    next(first)
    for other in (target, generator):
        with pytest.raises(DecoderBusyError, match="finish or close that one first, or load a second decoder"):
            run(other, {})
    run(draft, {}, new=2)  # the draft is free
    first.close()  # type: ignore[attr-defined]
    assert texts(run(generator, {})) == known
    second = generator.stream(PROMPTS, max_new_tokens=20)
    next(second)
    with pytest.raises(DecoderBusyError):
        run(draft, {})
    second.close()  # type: ignore[attr-defined]
    assert plain(target, {}) == known


def test_a_rejected_generation_does_not_disturb_the_running_one(workshop: Workshop) -> None:
    target = workshop.decoder()
    with target.held_by("a"):
        for _ in range(2):
            with pytest.raises(DecoderBusyError), target.held_by("b"):
                pass
            with target.held_by("a"):
                pass
    with pytest.raises(ZeroDivisionError), target.held_by("a"):
        raise ZeroDivisionError
    with target.held_by("b"):
        pass


def test_a_window_has_1_to_128_rows() -> None:
    for width in (1, 128):
        check_width(width)
    for width in (129, 0, -1):
        with pytest.raises(ConfigurationError, match=rf"expected 1 to 128 verified tokens \(k \+ 1\), got {width}"):
            check_width(width)


def test_a_width_that_does_not_fit_is_rejected_before_work(workshop: Workshop) -> None:
    draft, target = workshop.pair()
    for k in (128, -1):
        with pytest.raises(ConfigurationError):
            SpeculativeGenerator(draft, target, k=k)
    with pytest.raises(ConfigurationError, match="verify_width: expected at least 4 draft tokens and one more, got 3"):
        SpeculativeGenerator(draft, target, k=4, verify_width=3)
    known = plain(target, {}, new=4)
    assert texts(run(SpeculativeGenerator(draft, target, k=127), {}, new=4)) == known
