"""Configuration types of the command line, and options that several commands share.

`paceline.cli.config_options` makes options of the fields. Who drafts is `paceline.config.SpeculativeConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import prompt_files
from paceline.core.errors import PromptError, SamplingError
from paceline.decoder.backends.registry import BACKENDS
from paceline.engine.request import SamplingParams
from paceline.text.structured_output import StructuredOutput

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
InstanceName = Annotated[
    str | None,
    typer.Option(
        help="Instance type, such as inf2.48xlarge, or cpu: this machine's CPUs; default: what neuron-ls finds."
    ),
]
ModelsFile = Annotated[Path, typer.Argument(help="YAML file with a list `models`.")]
TargetFolder = Annotated[
    Path,
    typer.Option(help="Folder of the target, a GGUF file, a fetched model's name, or an id of the Hugging Face hub."),
]


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """How the target is loaded, in the words of `AutoDecoder.from_pretrained`. A draft has the same by default."""

    backend: Annotated[str, typer.Option(help=f"What runs the model: {', '.join(BACKENDS)}.")] = "native"
    amp: Annotated[str, typer.Option(help="Number format of weights and cache: bf16, f16 or f32.")] = "bf16"
    batch_size: Annotated[int, typer.Option(help="Requests decoded at the same time.")] = 1
    n_positions: Annotated[
        int | None, typer.Option(help="Longest text, prompt included; default: the model's own.")
    ] = None
    context_length_estimate: Annotated[
        tuple[int, ...] | None, typer.Option(help="Length of a prefill graph; repeatable. Default: 64 and 256.")
    ] = None
    tp_degree: Annotated[
        int, typer.Option(help="Tensor parallelism: ranks each model is divided over; above 1 with eager and neuron.")
    ] = 1
    group_query_attention: Annotated[
        str | None,
        typer.Option(help="K/V heads of divided models: shard-over-heads, replicated-heads or all-gather-heads."),
    ] = None
    quantization: Annotated[
        str | None,
        typer.Option(
            help="Format of the weight matrices: int8, int8_per_tensor, fp8_e4m3, fp8_e5m2, q8_0, q4_0, q4_1, or gguf "
            "to keep a GGUF file's."
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(help="Format of keys and values: int8, fp8_e4m3 or fp8_e5m2; default: the one that amp names."),
    ] = None


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How one text is sampled and when it ends."""

    temperature: Annotated[float, typer.Option(help="Above 0: sample. 0: greedy.")] = 0.0
    top_k: Annotated[int | None, typer.Option(help="Sample among so many tokens.")] = None
    top_p: Annotated[float | None, typer.Option(help="Sample within so much probability.")] = None
    min_p: Annotated[float | None, typer.Option(help="Leave out tokens below this share of the likeliest.")] = None
    seed: Annotated[int, typer.Option(help="The same seed gives the same tokens, whatever the draft.")] = 0
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens.")] = 128
    stop: Annotated[
        tuple[str, ...] | None,
        typer.Option(help="Text that ends the generation, taken as it is; repeatable. A line end in bash: $'\\n'."),
    ] = None
    json_schema: Annotated[Path | None, typer.Option(help="File with a JSON schema that the answer must fit.")] = None
    regex: Annotated[str | None, typer.Option(help="Regular expression that the whole answer must match.")] = None
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log-probabilities of every token and of so many likeliest, 0 to 20."),
    ] = None
    presence_penalty: Annotated[float, typer.Option(help="-2 to 2, off the logit of what is in the answer.")] = 0.0
    frequency_penalty: Annotated[float, typer.Option(help="-2 to 2, the same for each time it is there.")] = 0.0
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: divides the logits of what is in prompt or answer.")
    ] = None

    @property
    def ignores_filters(self) -> bool:
        """Whether there are filters that greedy decoding does not use."""
        return not self.temperature and any(value is not None for value in (self.top_k, self.top_p, self.min_p))

    def params(self) -> SamplingParams:
        """The same as `SamplingParams`, which lacks the tokenizer.

        Raises:
            SamplingError: a value is out of range, or the answer is to fit two things.
            PromptError: the schema's file cannot be read.
        """
        params = SamplingParams(
            do_sample=self.temperature != 0,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
            stop_strings=self.stop,
            structured_outputs=self._structured(),
            logprobs=self.logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
        )
        params.check()
        return params

    def _structured(self) -> StructuredOutput | None:
        """What the answer must be."""
        if self.json_schema is not None and self.regex is not None:
            raise SamplingError("an answer fits --json-schema or --regex; give one of them")
        if self.json_schema is not None:
            return StructuredOutput("json_schema", prompt_files.text(self.json_schema))
        return None if self.regex is None else StructuredOutput("regex", self.regex)


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Where the prompt comes from."""

    prompt: Annotated[str | None, typer.Option(help="The text to continue.")] = None
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="File with the prompt ('-': stdin); one newline at its end is left out.", allow_dash=True),
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="The text is a question, put into the model's chat template.")
    ] = False

    def text(self) -> str:
        """The prompt.

        Raises:
            PromptError: none or two of the options are given, or the prompt cannot be read.
        """
        if (self.prompt is None) == (self.prompt_file is None):
            raise PromptError("give the text to continue with --prompt or with --prompt-file, one of them")
        if self.prompt_file is None:
            return prompt_files.checked(self.prompt or "", "--prompt")
        return prompt_files.text(self.prompt_file).removesuffix("\n")


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What `generate` prints."""

    stats: Annotated[bool, typer.Option("--stats", help="Show counts and times on stderr.")] = False
    as_json: AsJson = False
