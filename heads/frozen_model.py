"""The target as a plain forward through transformers, for training: its hidden states and generated text."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import CheckpointError, ConfigurationError
from paceline.decoder.gguf.checkpoint import read_config
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights.checkpoint import load_weights
from paceline.decoder.weights.folder import is_gguf
from paceline.decoder.weights.hub import checkpoint_path


def transformers_model(path: str | os.PathLike[str], dtype: torch.dtype) -> Any:
    """Load the causal language model of a folder, a GGUF file or a fetched model, for inference; CheckpointError if it
    cannot be loaded. GGUF files are read by Paceline: transformers ignores rope scaling in them.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    place = checkpoint_path(path)
    if not is_gguf(place):
        try:
            return AutoModelForCausalLM.from_pretrained(place, dtype=dtype, local_files_only=True).eval()
        except (OSError, ValueError) as error:
            raise _unreadable(place, error) from error
    weights = load_weights(place, ModelConfig.from_pretrained(place), dtype)
    keys: dict[str, Any] = read_config(place)
    config = AutoConfig.for_model(**keys)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval()


def _unreadable(place: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{place}: expected a checkpoint that transformers can load, got an error ({error}); correct the folder"
    )


def check_trainable(path: str | os.PathLike[str], layers: tuple[int, ...]) -> None:
    """Raise the CheckpointError of `FrozenTarget` for the family of a checkpoint, without reading its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    place = checkpoint_path(path)
    try:
        keys: dict[str, Any] = read_config(place) if is_gguf(place) else {}
        config = AutoConfig.for_model(**keys) if keys else AutoConfig.from_pretrained(place, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise _unreadable(place, error) from error
    _decoder_of(model, layers, where=place)


def _decoder_of(model: Any, layers: tuple[int, ...], *, where: Path) -> Any:
    """Return the network without its output layer; CheckpointError if heads cannot be trained on its states."""
    decoder = model.get_decoder()
    several = bool(layers) and hasattr(decoder, "altup_projections")  # states of a token, as in Gemma 3n
    if several or not (hasattr(decoder, "norm") and hasattr(decoder, "layers")):
        raise CheckpointError(
            f"{where}: expected a target of one hidden state a token, with parts named as in Llama, to train "
            f"heads for, got {model.config.model_type}; use heads that are trained, or another target"
        )
    return decoder


_FORWARD = 8  # sequences per forward

PRECISIONS = {"f32": torch.float32, "bf16": torch.bfloat16}


def products(precision: str, device: str = "cpu") -> torch.autocast:
    """Return a context in which matmuls run in "f32" or "bf16" (autocast: weights and sums of losses stay float32).

    bf16 is two to three times as fast on a CPU with instructions for it (avx512_bf16, AMX), and slower on others; on a
    GPU it is many times as fast.
    """
    if precision not in PRECISIONS:
        raise ConfigurationError(
            f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}; use one of them"
        )
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bf16")


def check_device(device: str) -> None:
    """Raise ConfigurationError unless heads can be trained on this PyTorch device on this machine."""
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in {"cpu", "cuda"}:
        raise ConfigurationError(f"device: expected cpu, cuda or cuda:N, got {device!r}; use one of them")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"device: expected one of the {torch.cuda.device_count()} GPUs that PyTorch finds, got {device!r}; use "
            "cpu, or a PyTorch build and driver that find the GPU"
        )


@dataclass(frozen=True, slots=True)
class Texts:
    """Sequences with the target's states.

    tokens   [n, S] int64
    last     [n, S, H] after the final norm; ``last[:, t]`` predicts ``tokens[:, t + 1]``
    streams  [n, S, F], as a head reads them
    counted  [n, S] bool: the positions whose prediction a head learns and is measured on, in a conversation
             those of the answers; None = all
    """

    tokens: Tensor
    last: Tensor
    streams: Tensor
    counted: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def after(self, prompt: int) -> Texts:
        """Return the sequences with only the positions after the first ``prompt`` tokens counted."""
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return replace(self, counted=(places >= prompt).expand(self.tokens.shape))

    def part(self, places: slice) -> Texts:
        counted = None if self.counted is None else self.counted[places]
        return Texts(self.tokens[places], self.last[places], self.streams[places], counted)

    def rows(self, index: int, count: int) -> Texts:
        """Return part ``index`` of the sequences, ``count`` of them."""
        return self.part(slice(index * count, (index + 1) * count))

    def to(self, device: str) -> Texts:
        counted = None if self.counted is None else self.counted.to(device)
        return Texts(self.tokens.to(device), self.last.to(device), self.streams.to(device), counted)


class FrozenTarget:
    """A checkpoint that transformers can load, without gradients; CheckpointError if heads cannot be trained on its
    states.

    layers     the residual streams that `read` returns; empty = the last hidden state
    precision  of the matmuls of `read` and `states`; see `products`. On a GPU the weights, too, are in it
    device     of the model and its results; tokens may be on any device
    output, embedding   [V, H]
    norm       [H], the weight of the final norm
    """

    def __init__(
        self, folder: Path, layers: tuple[int, ...] = (), *, precision: str = "f32", device: str = "cpu"
    ) -> None:
        check_device(device)
        halves = precision == "bf16" and torch.device(device).type == "cuda"
        model = transformers_model(folder, torch.bfloat16 if halves else torch.float32).to(device)
        model.requires_grad_(False)
        decoder = _decoder_of(model, layers, where=folder)
        self.model: Any = model
        self.layers, self.precision, self.device = layers, precision, device
        self.output = nn.Parameter(model.get_output_embeddings().weight.detach().float(), requires_grad=False)
        self.embedding: Tensor = model.get_input_embeddings().weight.detach().float()
        self.norm: Tensor = decoder.norm.weight.detach().float()

    def fingerprint(self) -> str:
        """Identifies the model and precision of its hidden states, independent of file locations."""
        config = {name: value for name, value in self.model.config.to_dict().items() if name != "_name_or_path"}
        sums = {name: float(x.cpu().sum(dtype=torch.float64)) for name, x in self.model.named_parameters()}
        facts = [config, sums] if self.precision == "f32" else [config, sums, self.precision]
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def block(self, index: int) -> dict[str, Tensor]:
        """Return the weights of one layer, by their short names."""
        return {name: x.float() for name, x in self.model.get_decoder().layers[index].state_dict().items()}

    @torch.no_grad()
    def normed(self, states: Tensor) -> Tensor:
        made: Tensor = self.model.get_decoder().norm(states.to(self.device).float())
        return made

    @torch.no_grad()
    def states(self, tokens: Tensor) -> Tensor:
        """Compute hidden states: tokens [n, S] -> [n, S, H] float32, after the final norm."""
        with products(self.precision, self.device):
            states: Tensor = self.model.get_decoder()(tokens.to(self.device), use_cache=False).last_hidden_state.float()
        return states

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Texts:
        """Compute tokens [n, S] with their hidden states, in bfloat16."""
        tokens, decoder = tokens.to(self.device), self.model.get_decoder()
        before_norm: list[Tensor] = []
        # transformers returns the last stream only after the norm; a hook reads it before.
        hook = decoder.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
        try:
            with products(self.precision, self.device):
                parts = [
                    decoder(part, output_hidden_states=True, use_cache=False).hidden_states
                    for part in tokens.split(_FORWARD if self.device == "cpu" else len(tokens))
                ]
        finally:
            hook.remove()
        last = torch.cat([part[-1] for part in parts]).bfloat16()
        if not self.layers:
            return Texts(tokens, last, last)
        depth = len(decoder.layers)
        streams = [torch.cat([part[i] for part in parts] if i < depth else before_norm) for i in self.layers]
        return Texts(tokens, last, torch.cat(streams, -1).bfloat16())

    @torch.no_grad()
    def continued(self, prompts: Tensor, length: int, *, temperature: float = 0.0) -> Tensor:
        """Continue prompts [n, S] to [n, S + length] with the model, greedily at temperature 0."""
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {}
        prompts = prompts.to(self.device)
        tokens: Tensor = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=0,
            **{"do_sample": False, **sampled},
        )
        return tokens
