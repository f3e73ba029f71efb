"""Configuration types of the command line, options that several commands share, and what these load.

A command takes a dataclass or a pydantic model as one parameter; on the command line each of its fields is an option,
so that a key is declared once: its name with dashes, its type, default and description (pydantic's ``description``, a
dataclass field's metadata ``help``, with None there it is no option; ``names`` and ``envvar`` as in typer). A field
annotated with ``typer.Option`` keeps that. An option with a name in vLLM takes that name, too. Tuples and sequences are
repeatable options; what typer has no type for is taken as text, which the configuration type parses.
``Annotated[dict[str, Any], T, ...]`` are the options of several types as they are written, those that are given; what
another parameter of the command is called is left to it.
How a model is loaded is `paceline.decoder.options.LoadOptions`, who drafts `paceline.config.SpeculativeConfig`, and how
texts are sampled `paceline.engine.request.SamplingParams`.

Everything that configurations and options say is checked by `checked`, before PyTorch is imported.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from typer.models import ParameterInfo

from paceline.cli import console
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigurationError, PlanError, PromptError, SamplingError
from paceline.decoder.options import ALIASES, LoadOptions
from paceline.draft_checks import prepared
from paceline.engine.request import SamplingParams
from paceline.loadable import Loadable, loadable
from paceline.text.stop_strings import StopStrings
from paceline.text.structured_output import StructuredOutput

if TYPE_CHECKING:
    from paceline.auto import SamplingDecoder
    from paceline.decoder.decoder import CompiledDecoder
    from paceline.generator import SpeculativeGenerator
    from paceline.placement.planning.instances import Instance

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
BATCH_SIZE = "Number of requests decoded at the same time."
LAYOUT = "Layout to write: paceline, "
FixedK = Annotated[int, typer.Option(min=1, help="Number of draft tokens per round.")]
MaxDepth = Annotated[int, typer.Option(min=1, help="Largest number of draft tokens per round to try.")]
MaxNewTokens = Annotated[int, typer.Option(help="Maximum number of new tokens.")]
InstanceName = Annotated[
    str | None,
    typer.Option(
        help="Instance type such as inf2.48xlarge, or cpu for this machine's CPUs. Default: the type that neuron-ls "
        "reports."
    ),
]
ModelsFile = Annotated[Path, typer.Argument(help="YAML file with a list `models`.")]
TargetFolder = Annotated[
    Path,
    typer.Option(help="Target: a folder, a GGUF file, the name of a fetched model, or an id of the Hugging Face hub."),
]
TargetFormat = Annotated[
    Literal["int8"] | None, typer.Option(help="Format of the target's weights, for estimates. Default: 16 bits.")
]
ConfigFile = typer.Option(help="Target: its config.json, or a folder with one.")
OutFolder = Annotated[
    Path | None,
    typer.Option(help="Folder for the results; finished cells in it are kept. Required unless --dry-run is given."),
]
MaxMinutes = Annotated[
    float | None,
    typer.Option(
        "--max-minutes",
        "--minutes",
        min=0,
        help="Minutes after which no new cell starts; run the command again to resume. Default: no limit.",
    ),
]
DraftConfigFile = typer.Option(help="Draft model or EAGLE head: its config.json, or a folder with one.")
Trace = Annotated[Path, typer.Argument(help="Trace in the traces/ folder of an experiment.")]
NumPrompts = Annotated[int, typer.Option("--num-prompts", "--count", help="Number of prompts, from the first on.")]
TpDegree = Annotated[
    int,
    typer.Option(
        "--tp-degree",
        "--tp",
        "--tensor-parallel-size",
        min=1,
        help="Tensor-parallel degree: number of cores that both models are sharded over.",
    ),
]
SamplingKeys = Annotated[dict[str, Any], SamplingParams]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How one text is sampled and when it ends, in other words than `SamplingParams` or with other defaults."""

    temperature: Annotated[float, typer.Option(help="Sampling temperature: above 0 samples, 0 is greedy.")] = 0.0
    max_new_tokens: MaxNewTokens = 128
    stop: Annotated[
        tuple[str, ...] | None,
        typer.Option(help="Stop string, taken literally; repeatable. A newline in bash: $'\\n'. Default: none."),
    ] = None
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema that the output must match. Default: none.")
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the whole output must match. Default: none.")
    ] = None

    def params(self, keys: SamplingKeys) -> SamplingParams:
        """The same as `SamplingParams`, without a tokenizer. Raises SamplingError or, for the file of a schema,
        PromptError.
        """
        if self.json_schema is not None and self.regex is not None:
            raise SamplingError("--regex: expected either --json-schema or --regex, got both; give one of them")
        structure = None if self.regex is None else StructuredOutput("regex", self.regex)
        if self.json_schema is not None:
            structure = StructuredOutput("json_schema", _file_text(self.json_schema))
        stop = StopStrings(self.stop, scope="output") if self.stop else None  # as over HTTP
        own = {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens, "stop_strings": stop}
        params = SamplingParams.asked({**keys, **own, "structured_outputs": structure})
        params.check()
        return params


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Source of the prompt."""

    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="File with the prompt ('-': stdin); one newline at its end is dropped.", allow_dash=True),
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat the text as a question, and apply the model's chat template.")
    ] = False

    def text(self) -> str:
        """The prompt, or PromptError: none or two of the options are given, or it cannot be read."""
        if (self.prompt is None) == (self.prompt_file is None):
            raise PromptError(
                "--prompt: expected either --prompt or --prompt-file, got both or neither; give one of them"
            )
        if self.prompt_file is None:
            return _checked_text(self.prompt or "", "--prompt")
        return _file_text(self.prompt_file).removesuffix("\n")


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Output of `generate`."""

    stats: Annotated[bool, typer.Option("--stats", help="Show counts and times on stderr.")] = False
    as_json: AsJson = False


def neuron_instance(name: str | None) -> Instance:
    """The instance type of that name; None is this machine. Raises PlanError if there is no such type, or no chip."""
    from paceline.placement.planning.instances import instance_named

    found = instance_named(name)
    if name is None and not found.sdk:
        raise PlanError("--instance: expected a type such as inf2.48xlarge where no Neuron chip is, got none; name one")
    return found


_PANELS: dict[Any, str] = {
    LoadOptions: "Model",
    SpeculativeConfig: "Drafting",
    SamplingOptions: "Sampling",
    SamplingParams: "Sampling",
    OutputOptions: "Output",
}
"""Of a configuration type the panel of its options in the help."""


def checked(target: Path, options: LoadOptions, config: SpeculativeConfig | None = None) -> Loadable:
    """The target of a command, which can be loaded, with the drafters that are asked for; errors as `prepared`."""
    found = loadable(target, options)
    if config is not None:
        prepared(config, found)
    return found


def load(found: Loadable) -> SamplingDecoder:
    """`paceline.auto.load` with a bar."""
    from paceline import auto

    with console.bar(console.err(), f"loading {found.folder}") as shown:
        return auto.load(found, shown.reach)


def load_draft(
    decoder: SamplingDecoder, config: SpeculativeConfig
) -> tuple[SpeculativeGenerator, dict[str, CompiledDecoder]]:
    """A generator, and its decoders by the names to show. With neither draft nor ``k`` every plain step is a graph."""
    from paceline.auto_drafter import load_draft_models
    from paceline.generator import SpeculativeGenerator

    config = load_draft_models(config, decoder, load)
    if not config.draft and config.k is None:
        config = config.model_copy(update={"k": 0})
    generator = SpeculativeGenerator(target=decoder, **dict(config))
    drafts = generator.decoders[1:]
    names = ["draft"] if len(drafts) == 1 else [f"draft {number}" for number in range(1, len(drafts) + 1)]
    return generator, {"target": decoder, **dict(zip(names, drafts, strict=True))}


Result = TypeVar("Result")

_SIMPLE = (str, int, float, bool, Path)
_REQUIRED = inspect.Parameter.empty


def command(
    app: typer.Typer, name: str | None = None, *, hidden: Collection[str] = (), without: Collection[str] = ()
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Add a command to ``app``, as ``app.command(name)`` does, with options for its configuration types.

    ``hidden``: fields whose options the help leaves out; ``without``: fields that are no options.
    """

    def add(function: Callable[..., Result]) -> Callable[..., Result]:
        app.command(name=name)(expand(function, hidden=hidden, without=without))
        return function

    return add


def expand(
    function: Callable[..., Result], *, hidden: Collection[str] = (), without: Collection[str] = ()
) -> Callable[..., Result]:
    """The same command with every field of its configuration types as a parameter.

    Values that a configuration type refuses are shown as an error of the command line.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[[dict[str, Any]], Any], list[_Option]]] = {}
    for parameter in inspect.signature(function).parameters.values():
        kind = hints[parameter.name]
        kinds, make = _configuration(kind)
        if make is None:
            parameters.append(parameter.replace(annotation=kind, kind=parameter.KEYWORD_ONLY))
            continue
        known = {one.name for one in parameters} | set(without)
        options = [option for one in kinds for option in _options(one) if option.parameter.name not in known]
        for option in options:
            option.info.hidden = option.parameter.name in hidden
        groups[parameter.name] = (make, options)
        parameters += [option.parameter for option in options]

    @wraps(function)
    def run(**values: Any) -> Result:
        with console.refusals():
            for name, (make, options) in groups.items():
                given = {}
                for option in options:
                    value = values.pop(option.parameter.name)
                    single = option.one_or_more and isinstance(value, list) and len(value) == 1
                    if value is not None:
                        given[option.parameter.name] = value[0] if single else value
                values[name] = make(given)
        return function(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _configuration(kind: Any) -> tuple[Sequence[Any], Callable[[dict[str, Any]], Any] | None]:
    """The configuration types of a parameter, and what makes its value of their options; None: it has no such type."""
    if get_origin(kind) is Annotated and get_origin(get_args(kind)[0]) is dict:
        kinds = get_args(kind)[1:]
        usual = {option.parameter.name: option.parameter.default for one in kinds for option in _options(one)}
        return kinds, lambda given: {name: value for name, value in given.items() if value != usual[name]}
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel)):
        return [kind], lambda given: kind(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        )
    return [], None


@dataclass(frozen=True, slots=True)
class _Option:
    """One field on the command line.

    parameter    the keyword that typer makes an option of; ``info``: typer's settings of it
    one_or_more  whether a single value of a repeatable option stands for itself, and is no list of one
    """

    parameter: inspect.Parameter
    info: ParameterInfo
    one_or_more: bool


def _options(kind: Any) -> list[_Option]:
    options = []
    for name, annotation, usual, default in _fields(kind):
        own, *extra = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
        info = copy(next((part for part in extra if isinstance(part, ParameterInfo)), usual))
        info.rich_help_panel = _PANELS.get(kind)
        text, default, one_or_more = _typer_type(own, default)
        if kind in (LoadOptions, SpeculativeConfig) and name in ALIASES.values():
            names = name, *(alias for alias, other in ALIASES.items() if other == name)
            first, *others = (f"--{one.replace('_', '-')}" for one in names)
            info.param_decls = (f"{first}/--no-{first[2:]}" if text is bool else first, *others)
        annotated, keyword = Annotated[text, info], inspect.Parameter.KEYWORD_ONLY
        parameter = inspect.Parameter(name, keyword, default=default, annotation=annotated)
        options.append(_Option(parameter, info, one_or_more))
    return options


def _fields(kind: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Name, annotation, option and default of every field that is an option."""
    if issubclass(kind, BaseModel):
        for name, one in kind.model_fields.items():
            yield name, one.annotation, typer.Option(help=one.description), one.get_default()
        return
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        about = field.metadata
        if about.get("help", "") is not None:
            default = _REQUIRED if field.default is dataclasses.MISSING else field.default
            usual = typer.Option(*about.get("names", ()), help=about.get("help"), envvar=about.get("envvar"))
            yield field.name, hints[field.name], usual, default


def _typer_type(kind: Any, default: Any) -> tuple[Any, Any, bool]:
    """A type that typer knows, a default of that type, and whether it is for one value or several. Of what may be one
    value or a sequence, the first is the option's.
    """
    variants = [
        one for one in (get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)) if one is not type(None)
    ]
    first, several = variants[0], any(get_origin(one) is Sequence for one in variants)
    if get_origin(first) is Sequence or (len(variants) == 1 and get_origin(first) is tuple):
        element = get_args(first)[0]
        values = default if default is _REQUIRED else list(default or ()) or None
        return list[element if element in _SIMPLE else str] | None, values, len(variants) > 1  # type: ignore[misc]
    text: Any = first if (several or len(variants) == 1) and first in _SIMPLE else str
    if default is None:
        return text | None, None, False
    return text, default if text is not str or default is _REQUIRED else str(default), False


def numbers(text: str, option: str, *, least: int = 0) -> tuple[int, ...]:
    """The numbers of ``4``, ``1,2,4`` or ``1:8`` (both ends included), or ConfigurationError, also for one below
    ``least``.
    """
    first, colon, last = text.partition(":")
    try:
        found = tuple(range(int(first), int(last) + 1)) if colon else tuple(map(int, text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < least:
        raise ConfigurationError(f"{option}: expected numbers from {least} on, got {text!r}; write 4, 1,2,4 or 1:8")
    return found


def shares(text: str, option: str) -> tuple[float, ...]:
    """The numbers from 0 to 1 of ``0.4`` or ``0.4,0.3``, or ConfigurationError."""
    try:
        values = tuple(map(float, text.split(",")))
    except ValueError:
        values = ()
    if not values or not all(0 <= value <= 1 for value in values):
        raise ConfigurationError(f"{option}: expected numbers from 0 to 1, got {text!r}; write 0.8, or 0.8,0.7")
    return values


def _file_text(file: Path) -> str:
    """Text of a file, or of stdin ("-"), without a byte order mark. Raises PromptError if it cannot be read."""
    try:
        return _checked_text(sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8-sig"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{file}: the file cannot be read ({error}); check the path and its permissions") from error


def _checked_text(text: str, where: str) -> str:
    """A text, or PromptError: JSON, and bytes of a command line that are none, may make what UTF-8 cannot write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{where}: expected valid Unicode, got half a surrogate pair; give UTF-8") from error
    return text


def read_prompts(file: Path) -> list[str]:
    """The "prompt" of every line of a file of JSON objects. Raises PromptError if it is none, or cannot be read."""
    # Not `splitlines`: JSON leaves Unicode's line ends as they are.
    return [_prompt(line, file) for line in _file_text(file).split("\n") if line.strip()]


def _prompt(line: str, file: Path) -> str:
    try:
        prompt, reason = json.loads(line)["prompt"], "a prompt that is not a string"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        prompt, reason = None, str(error)
    if not isinstance(prompt, str):
        raise PromptError(f'{file}: expected JSON lines, each with a "prompt", got {reason}; correct the file')
    return _checked_text(prompt, str(file))
