"""Tiny Llama models as GGUF files, written with the `gguf` package as llama.cpp's converter would; no tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

BYTES = sorted(set(range(33, 127)) | set(range(161, 173)) | set(range(174, 256)))
ALPHABET = [chr(b) for b in BYTES] + [chr(256 + i) for i in range(256 - len(BYTES))]
MERGES = ["h e", "l l", "he ll", "hell o", "\u0120 hello", "\u0120 \u0120", "1 2"]
SPECIAL = ["<|start|>", "<|end|>"]
TOKENS = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), *SPECIAL, "[PAD265]"]
VOCABULARY = len(TOKENS)
START, END = VOCABULARY - 3, VOCABULARY - 2
TEMPLATE = "{% for m in messages %}<|start|>{{ m['role'] }} {{ m['content'] }}<|end|>{% endfor %}"

# Where the 16-bit scales of a block lie, and what makes weights of the usual size. The gguf package quantises none of
# these types.
SCALES = {
    Kind.Q2_K: ((80, 0.004), (82, 0.004)),
    Kind.Q3_K: ((108, 0.001),),
    Kind.Q4_K: ((0, 0.0002), (2, 0.0015)),
    Kind.Q5_K: ((0, 0.0001), (2, 0.0015)),
    Kind.Q6_K: ((208, 0.00006),),
    Kind.IQ4_NL: ((0, 0.001),),
}
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
HEADS, KEY_HEADS = 4, 2


def network(*, tied: bool = False, bias: bool = False, rope: Mapping[str, object] | None = None) -> LlamaForCausalLM:
    """Rows of 256 numbers, as the blocks of K-quants want them."""
    torch.manual_seed(0)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, max_position_embeddings=128, rms_norm_eps=1e-5,
            tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias, bos_token_id=START, eos_token_id=END,
            pad_token_id=None, rope_parameters={"rope_type": "default", "rope_theta": 50000.0, **(rope or {})},
        )
    )  # fmt: skip
    for name, parameter in made.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.1)
    return made.eval()


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor of Hugging Face."""
    stem, _, kind = name.rpartition(".")
    layer = ""
    if stem.startswith("model.layers."):
        number, _, stem = stem.removeprefix("model.layers.").partition(".")
        layer = f"blk.{number}."
    return f"{layer}{_NAMES[stem]}.{kind}"


def permuted(name: str, tensor: NDArray[Any]) -> NDArray[Any]:
    """Order the rows of queries and keys as llama.cpp's converter does."""
    heads = {"q_proj": HEADS, "k_proj": KEY_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def stored(tensor: NDArray[Any], kind: Kind, seed: int) -> NDArray[Any]:
    """The bytes of a matrix in a type: quantised where the package can, else random blocks with plausible scales."""
    if kind in (Kind.F32, Kind.F16):
        return tensor.astype(np.float32 if kind is Kind.F32 else np.float16)
    if kind not in SCALES:
        quantised: NDArray[Any] = gguf.quants.quantize(tensor, kind)
        return quantised
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (tensor.size // size, num_bytes), dtype=np.uint8)
    for at, scale in SCALES[kind]:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(tensor.shape[0], -1)


def keys_of(made: LlamaForCausalLM) -> dict[str, object]:
    """The keys of the architecture that the converter writes."""
    config = made.config
    return {
        "llama.context_length": config.max_position_embeddings, "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers, "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"], "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size, "general.name": "tiny", "general.file_type": 0,
    }  # fmt: skip


TOKENIZER: dict[str, object] = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * (VOCABULARY - 3) + [3, 3, 5], "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": START, "tokenizer.ggml.eos_token_id": END, "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
}  # fmt: skip


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(
    path: Path,
    made: LlamaForCausalLM,
    kind: Kind = Kind.F32,
    *,
    changes: Mapping[str, object] | None = None,
    extra: Mapping[str, NDArray[Any]] | None = None,
    architecture: str = "llama",
) -> Path:
    """The model as a GGUF file: matrices in one type, the rest in F32.

    changes  of the keys; None = without it
    extra    tensors besides the model's, or in place of one of its
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**keys_of(made), **TOKENIZER, **(changes or {})}.items():
        if value is not None:
            add(writer, key, value)
    tensors = {
        gguf_name(name): permuted(name, tensor.numpy()) for name, tensor in made.state_dict().items()
        if not (name == "lm_head.weight" and made.config.tie_word_embeddings)
    }  # fmt: skip
    for seed, (name, tensor) in enumerate({**tensors, **(extra or {})}.items()):
        form = kind if tensor.ndim == 2 else Kind.F32
        data = stored(tensor, form, seed) if tensor.dtype == np.float32 else tensor
        writer.add_tensor(name, data, raw_dtype=form if data.dtype == np.uint8 else None)
    finish(writer)
    return path


def add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """A key in the type that converters use."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, list)
        writer.add_array(key, value)
