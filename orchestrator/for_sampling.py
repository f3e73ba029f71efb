"""The names of transformers-neuronx' classes, for programs written for them: `AutoDecoder`, one family each."""

from __future__ import annotations

from paceline.auto import AutoDecoder


class BloomForSampling(AutoDecoder):
    """`AutoDecoder` for checkpoints of this family alone."""

    families = ("bloom",)


class GPT2ForSampling(AutoDecoder):
    """`AutoDecoder` for checkpoints of this family alone."""

    families = ("gpt2",)


class GPTJForSampling(AutoDecoder):
    """`AutoDecoder` for checkpoints of this family alone."""

    families = ("gptj",)


class GPTNeoXForSampling(AutoDecoder):
    """`AutoDecoder` for checkpoints of this family alone."""

    families = ("gpt_neox",)


class Gemma2ForSampling(AutoDecoder):
    """`AutoDecoder` for checkpoints of this family alone."""

    families = ("gemma2",)


class Gemma3ForSampling(AutoDecoder):
    """`AutoDecoder` for checkpoints of this family alone."""

    families = ("gemma3_text",)


class LlamaForSampling(AutoDecoder):
    """`AutoDecoder` for checkpoints of this family alone."""

    families = ("llama",)


class MistralForSampling(AutoDecoder):
    """`AutoDecoder` for checkpoints of this family alone."""

    families = ("mistral",)


class MixtralForSampling(AutoDecoder):
    """`AutoDecoder` for checkpoints of this family alone."""

    families = ("mixtral",)


class OPTForSampling(AutoDecoder):
    """`AutoDecoder` for checkpoints of this family alone."""

    families = ("opt",)


class Phi3ForSampling(AutoDecoder):
    """`AutoDecoder` for checkpoints of this family alone."""

    families = ("phi3",)


class Qwen2ForSampling(AutoDecoder):
    """`AutoDecoder` for checkpoints of this family alone."""

    families = ("qwen2",)


class Qwen3ForSampling(AutoDecoder):
    """`AutoDecoder` for checkpoints of this family alone."""

    families = ("qwen3",)


class Qwen3MoeForSampling(AutoDecoder):
    """`AutoDecoder` for checkpoints of this family alone."""

    families = ("qwen3_moe",)
