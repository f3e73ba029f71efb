"""`DecoderApplication`: a decoder with the life cycle of NxD Inference's `NeuronApplicationBase`. A thin layer over
`AutoDecoder`, `SlotCache` and the adapter, which programs may use without it.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from paceline.auto import SamplingDecoder
from paceline.core.errors import ConfigurationError
from paceline.decoder.backends.registry import BACKENDS
from paceline.decoder.weights.save_quantized import save_quantized
from paceline.generator import SpeculativeGenerator
from paceline.huggingface.adapter import HuggingFaceGenerationAdapter
from paceline.huggingface.cache import SlotCache
from paceline.neuron_config import NeuronConfig

CONFIG_FILE = "paceline_config.json"


class DecoderApplication:
    """Compile, load, run and reset one decoder.

    path     folder of the checkpoint
    config   a `NeuronConfig`; default: its defaults
    backend  in place of the configuration's
    """

    def __init__(
        self, path: str | os.PathLike[str], config: NeuronConfig | None = None, *, backend: str | None = None
    ) -> None:
        self.path, self.config = Path(path), config or NeuronConfig()
        self.backend = backend or self.config.backend
        self._decoder: SamplingDecoder | None = None
        self._text: SlotCache | None = None
        self._compiled = False

    @property
    def decoder(self) -> SamplingDecoder:
        """The decoder. ConfigurationError if nothing is loaded yet."""
        if self._decoder is None:
            raise ConfigurationError("the model is not loaded; call load(), or compile(folder) first")
        return self._decoder

    def compile(self, folder: str | os.PathLike[str]) -> None:
        """Compile every graph that the configuration needs into ``folder``, and store the configuration with them. For
        Neuron: CPUs keep no graphs.
        """
        self.load()
        Path(folder).mkdir(parents=True, exist_ok=True)
        if BACKENDS[self.backend].saves:
            self.generator().compile()
            self.decoder.save(Path(folder))
        (Path(folder) / CONFIG_FILE).write_text(self.config.to_json(), encoding="utf-8")
        self._compiled = True

    def load(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Load the weights, and the graphs that `compile` wrote into ``folder``.

        Raises:
            ConfigurationError: the folder was compiled for another configuration.
            ArtefactError: it holds no graphs for this model and machine.
        """
        if folder is not None and (file := Path(folder) / CONFIG_FILE).is_file():
            compiled = NeuronConfig.from_json(file.read_text(encoding="utf-8"))
            if compiled != self.config:
                raise ConfigurationError(
                    f"{folder}: expected graphs of this configuration, got those of another; use the configuration "
                    f"in {file}"
                )
        if self._decoder is None:
            self._decoder = self.config.load(self.path, backend=self.backend)
        if folder is not None and BACKENDS[self.backend].saves:
            self._decoder.load(Path(folder))
        self._compiled = self._compiled or folder is not None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_ids: Tensor | None = None,
        sampling_params: Tensor | None = None,
    ) -> Tensor:
        """Append tokens to the sequences in the slots. input_ids and attention_mask [R, T] -> logits [R, V] float32.

        position_ids     [R, T]: the positions that follow, or from 0 on, which begins new sequences
        seq_ids          [R]: the slot of each row, if not in order
        sampling_params  [R, 3] of NxD Inference; it changes no logits, as there

        Raises:
            ConfigurationError: nothing is loaded yet, or the positions or slots are not these.
            PromptError, ContextError, DecoderBusyError: as `SlotCache.read`.
        """
        if sampling_params is not None and self.config.on_device_sampling is not None:
            raise ConfigurationError(
                "sampling_params: expected none, since forward returns logits, got some with "
                "on_device_sampling_config; use generator().sample"
            )
        rows = torch.arange(len(input_ids)) if seq_ids is None else seq_ids.flatten().long()
        if not torch.equal(rows.sort().values, torch.arange(len(input_ids))):
            raise ConfigurationError(
                f"seq_ids: expected each of the slots 0 to {len(input_ids) - 1}, got {rows.tolist()}; give every row's"
            )
        order = rows.argsort()
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        real = real[order] != 0
        if position_ids is not None:
            self._place(position_ids[order], real)
        if self._text is None:
            self._text = SlotCache(self.decoder)
        return self._text.read(input_ids[order], real, 1)[rows, 0]

    def _place(self, positions: Tensor, real: Tensor) -> None:
        ahead = real.cumsum(1) - 1
        if torch.equal(positions[real], ahead[real].to(positions.dtype)):
            self._text = None
            return
        lengths = torch.zeros(len(real), dtype=torch.long) if self._text is None else self._text.mask.sum(1)
        wanted = ahead + lengths[:, None]
        if not torch.equal(positions[real], wanted[real].to(positions.dtype)):
            raise ConfigurationError(
                f"position_ids: expected {wanted.tolist()} or positions from 0 on, got {positions.tolist()}; omit it"
            )

    __call__ = forward

    def reset(self) -> None:
        """Forget the sequences in the slots: the next `forward` begins new ones."""
        self._text = None

    def quantize(self, folder: str | os.PathLike[str]) -> None:
        """Write the checkpoint with 8-bit weights; a `DecoderApplication` of that folder needs no ``quantization``."""
        save_quantized(self.path, folder, self.config.quantization or "int8")

    def generator(self, draft: object = None) -> SpeculativeGenerator:
        """A generator with the configuration's draft, or another one; plain decoding if there is none."""
        draft, caching = self.config.draft_model_path if draft is None else draft, self.config.prefix_caching
        if draft is None:
            return SpeculativeGenerator(None, self.decoder, k=0, prefix_caching=caching)
        return SpeculativeGenerator(
            draft, self.decoder, k=self.config.k, fused=self.config.fused, prefix_caching=caching
        )

    def adapter(self) -> HuggingFaceGenerationAdapter:
        """Return a `transformers` model of the decoder, or of the generator if the configuration names a draft."""
        return HuggingFaceGenerationAdapter(self)

    def served(self) -> SamplingDecoder | SpeculativeGenerator:
        return self.decoder if self.config.draft_model_path is None else self.generator()

    @property
    def is_loaded_to_neuron(self) -> bool:
        """Whether the weights are loaded, on whatever backend."""
        return self._decoder is not None

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` has written a folder, or `load` has read one."""
        return self._compiled

    def close(self) -> None:
        if self._decoder is not None:
            self._decoder.close()
        self._decoder = self._text = None
