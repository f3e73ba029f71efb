"""`paceline generate`, `chat` and `bench`: texts continued, conversations, and the speed of a pair in every mode.

How text looks is in `paceline.cli.console`; what is measured, in `paceline.experiments.bench`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from paceline.cli import console
from paceline.cli.options import (
    AsJson,
    MaxNewTokens,
    NumPrompts,
    OutputOptions,
    PromptOptions,
    SamplingKeys,
    SamplingOptions,
    TargetFolder,
    checked,
    command,
    load,
    load_draft,
    numbers,
    read_prompts,
)
from paceline.config import OF_DRAFTS, OF_MODELS, SpeculativeConfig
from paceline.core.errors import ConfigurationError, PacelineError, PromptError, SamplingError
from paceline.core.types import TokenLogprobs
from paceline.decoder.backends.registry import BACKENDS
from paceline.decoder.environment import cache_root
from paceline.decoder.options import LoadOptions
from paceline.draft_checks import make_rule
from paceline.draft_spec import parse_draft
from paceline.engine.request import Request, SamplingParams
from paceline.loadable import request_limits
from paceline.outputs import FinishReason, RequestOutput, Statistics
from paceline.text.chat import ChatSession, chat_ids
from paceline.text.stop_strings import StopStringFilter, StopStrings
from paceline.text.tokenizer import Tokenizer, load_tokenizer, prompt_ids

if TYPE_CHECKING:
    from paceline.auto import SamplingDecoder
    from paceline.generator import OutputStream, SpeculativeGenerator

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class Continuation:
    """A finished text: without its prompt, as text and as ids, and why it ended; and log-probabilities, if wanted: of
    it, and of its prompt from the second token on.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


@command(app, hidden={"batch_size"})
def generate(
    target: TargetFolder,
    prompt: PromptOptions,
    config: SpeculativeConfig,
    *,
    sampling: SamplingOptions,
    keys: SamplingKeys,
    loader: LoadOptions,
    output: OutputOptions,
) -> None:
    """Generate text, without or with a drafter (`paceline list` shows them)."""
    with console.refusals():
        text = prompt.text()
        if not sampling.temperature and not {"top_k", "top_p", "min_p"}.isdisjoint(keys):
            console.say(console.err(), "note: greedy decoding ignores top-k, top-p and min-p; set --temperature")
        params, found = sampling.params(keys), checked(target, loader, config)
        tokenizer = load_tokenizer(target)
        ids = chat_ids(tokenizer, [{"role": "user", "content": text}]) if prompt.chat else prompt_ids(tokenizer, text)
        params = replace(params, tokenizer=tokenizer)
        Request.batch([ids], params, request_limits(found, make_rule(config)))
        generator, decoders = load_draft(load(found), config)
        if BACKENDS[loader.backend].compiles:
            console.compiling(console.err(), decoders, [generator.compile])
        stream = generator.stream([ids], params=params)
        warning = console.acceptance_warning(generator.statistics)
        begin, stop = perf_counter(), StopStrings.of(params.stop_strings)
        if output.as_json:
            continuation = _quiet(stream, StopStringFilter(stop, tokenizer, ids), total=sampling.max_new_tokens)
            fields = {name: value for name, value in asdict(continuation).items() if value is not None}
            first = {} if warning is None else {"warning": warning}  # so that it is not missed
            answer = {**first, "prompt": text, **fields, "statistics": generator.statistics.to_dict()}
            typer.echo(json.dumps(answer))
        else:
            if warning is not None:  # on stdout too: it must not get lost in a pipe
                console.say(console.out(), warning, style="bold red")
            view = console.TextView(console.out(), tokenizer, ids, stop=stop)
            if console.out().is_terminal:
                console.err().print(view.legend())
                view.prompt(text)
            _collected(stream, view.show)
            typer.echo()
        if output.stats:
            console.err().print(console.statistics_table(generator.statistics, perf_counter() - begin))


def _quiet(
    stream: Iterator[RequestOutput], text: StopStringFilter, *, total: int, label: str = "generating"
) -> Continuation:
    with console.bar(console.err(), label, total) as bar:

        def piece(output: RequestOutput) -> str:
            bar.advance(len(output.tokens))
            return "".join(map(text.push, output.tokens)) + (text.flush() if output.finish_reason else "")

        return _collected(stream, piece)


def _collected(stream: Iterator[RequestOutput], piece: Callable[[RequestOutput], str]) -> Continuation:
    pieces: list[str] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    of_prompt: list[TokenLogprobs] | None = None
    reason: FinishReason = "length"
    for output in stream:
        if output.error is not None:
            raise output.error
        if output.token_logprobs is not None:
            logprobs = [*(logprobs or ()), *output.token_logprobs]
        if output.prompt_logprobs is not None:
            of_prompt = list(output.prompt_logprobs)
        pieces.append(piece(output))
        tokens += output.tokens
        reason = output.finish_reason or reason
    return Continuation("".join(pieces), tokens, reason, logprobs, of_prompt)


PLAIN = "plain"

HELP = """/draft DRAFT  use another drafter, as in --draft: plain, ngram, suffix, a folder, DIR:k=4 (also /mode),
              or one of the drafters of a choice, which is not loaded again
/race [DRAFT] answer the last question without a draft, then with each of these, and show the speeds
/stats        counts and times of the last answer
/seed N       the seed of the answers that follow
/system TEXT  set the system message and start a new conversation
/save FILE    write the conversation as JSON
/load FILE    continue a saved conversation
/reset        forget what was said
/help, /quit  this text; the end (so does Ctrl-D). Ctrl-C stops an answer.
A line that ends with \\ continues on the next one; so do all lines between \"\"\" and \"\"\"."""

_BLOCK = '"""'
"""What begins and ends a question of several lines."""

_REMEMBERED = 1000
"""Number of lines that the history file keeps."""

HistoryFile = Annotated[
    Path | None,
    typer.Option(help="File of earlier questions, on a terminal. Default: chat_history in the cache folder."),
]

System = Annotated[str | None, typer.Option(help="System message. Default: the chat template's own.")]


@command(app, hidden={"batch_size"})
def chat(
    target: TargetFolder,
    config: SpeculativeConfig,
    *,
    sampling: SamplingOptions,
    keys: SamplingKeys,
    loader: LoadOptions,
    system: System = None,
    history_file: HistoryFile = None,
) -> None:
    """Talk to a chat model: each line is a question, /help lists the commands."""
    with console.refusals():
        params, found = sampling.params(keys), checked(target, loader, config)
        tokenizer = load_tokenizer(target)
        params = replace(params, tokenizer=tokenizer)
        decoder = load(found)
        longest = decoder.n_positions - (params.max_new_tokens or 0)
        modes = Modes(decoder, config, compiled=BACKENDS[loader.backend].compiles)
        session = Session(modes, ChatSession(tokenizer, longest, system), params)
        modes.use(None)
        with history(history_file or cache_root() / "chat_history") if sys.stdin.isatty() else nullcontext():
            session.run()


@contextmanager
def history(file: Path) -> Iterator[None]:
    """Let `input` recall the lines of a file, and write it at the end, readable by its owner only."""
    try:
        import readline
    except ImportError:  # Python was built without it
        yield
        return
    with suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        readline.set_history_length(_REMEMBERED)
        with suppress(OSError):  # a full or read-only disk ends no conversation
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.write_history_file(file)


@dataclass(slots=True)
class Modes:
    """Generators of one target by who drafts; each is made at its first use. ``drafter``: the one of a choice."""

    target: SamplingDecoder
    config: SpeculativeConfig
    compiled: bool
    generators: dict[str | None, SpeculativeGenerator] = field(default_factory=dict)
    current: str | None = None
    drafter: str | None = None

    def use(self, draft: str | None) -> None:
        """Let that one draft; None: what the command line said. After a PacelineError the one before stays."""
        usual = self.generators.get(None)
        of_choice = usual is not None and draft in usual.limits.drafters
        if not of_choice and draft not in self.generators:
            config = self.config if draft is None else _of_mode(self.config, draft)
            generator, decoders = load_draft(self.target, config)
            if self.compiled:
                console.compiling(console.err(), decoders, [generator.compile])
            self.generators[draft] = generator
        self.current, self.drafter = (None, draft) if of_choice else (draft, None)

    @property
    def name(self) -> str | None:
        """Argument of `use` that leads to the current mode."""
        return self.drafter or self.current

    def stream(self, ids: list[int], params: SamplingParams) -> OutputStream:
        return self.generator.stream([ids], params=replace(params, drafter=self.drafter))

    @property
    def generator(self) -> SpeculativeGenerator:
        return self.generators[self.current]


def _of_mode(config: SpeculativeConfig, draft: str) -> SpeculativeConfig:
    """The command line's configuration with another draft, without the options that mean nothing to it."""
    specs = () if draft == PLAIN else parse_draft(draft)
    dropped = {"draft", "k"} if specs else {"draft", "k"} | config.names(OF_DRAFTS)
    if not any(leaf.path for spec in specs for leaf in spec.leaves()):
        dropped |= config.names(OF_MODELS)
    kept = {name: getattr(config, name) for name in config.model_fields_set - dropped}
    return SpeculativeConfig(draft=specs, **kept)


@dataclass(slots=True)
class Session:
    """Reads lines, answers questions and obeys commands until the input is at its end. ``asked``: the last prompt."""

    modes: Modes
    conversation: ChatSession
    params: SamplingParams
    last: tuple[Statistics, float] | None = None
    asked: list[int] | None = None

    def run(self) -> None:
        if sys.stdin.isatty():
            console.err().print(f"{console.legend()} /help lists the commands.")
        while (line := self._read()) is not None:
            try:
                if line.startswith("/"):
                    if self._obey(*line[1:].partition(" ")[::2]):
                        return
                elif line:
                    self.reply(line)
            except PacelineError as error:
                console.say(console.err(), f"error: {error}", style="red")
            except KeyboardInterrupt:  # while a mode is loaded or compiled
                console.say(console.err(), " [stopped]")

    def _read(self) -> str | None:
        """The next question or command, of one line or several; None at the end of the input."""
        lines: list[str] = []
        block = False
        try:
            while True:
                line = input(("... " if lines or block else "> ") if sys.stdin.isatty() else "")
                if line.strip() == _BLOCK:
                    if block:
                        return "\n".join(lines)
                    block = True
                elif block:
                    lines.append(line)
                elif line.endswith("\\"):
                    lines.append(line.removesuffix("\\"))
                else:
                    return "\n".join([*lines, line]).strip()
        except EOFError:
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            typer.echo()
            return ""

    def reply(self, question: str) -> None:
        """Answer, shown while it is written; what Ctrl-C leaves of it stays in the conversation, a refused question
        does not.
        """
        ids, forgotten = self.conversation.ask(question)
        if forgotten:
            console.say(console.err(), f"note: the first {forgotten} messages were forgotten to make room")
        tokenizer: Tokenizer = self.conversation.tokenizer
        view = console.TextView(console.out(), tokenizer, ids, stop=StopStrings.of(self.params.stop_strings))
        pieces: list[str] = []
        begin = perf_counter()
        try:
            stream = self.modes.stream(ids, self.params)
        except PacelineError:
            self.conversation.turns.pop()
            raise
        self.asked = ids
        statistics = self.modes.generator.statistics
        if (warning := console.acceptance_warning(statistics)) is not None:
            console.say(console.err(), warning, style="bold red")
        try:
            for event in stream:
                if event.error is not None:
                    raise event.error
                pieces.append(view.show(event))
                if event.finish_reason == "length":
                    most = f"{self.params.max_new_tokens} tokens"
                    console.say(console.err(), f" [cut at {most}: --max-new-tokens]", style="yellow")
        except KeyboardInterrupt:
            console.say(console.err(), " [stopped]")
        finally:
            stream.close()
            self.conversation.answer("".join(pieces))
        typer.echo()
        self.last = (statistics, perf_counter() - begin)

    def race(self, drafts: Sequence[str]) -> None:
        """Answer the last question without a draft and then with each, one after the other, and show the speeds.
        Without ``drafts`` the current one runs. The conversation and the mode stay as they are, also after a
        PacelineError.
        """
        if self.asked is None:
            raise PromptError("/race: expected a question before it, got none; ask one")
        tokenizer = self.params.tokenizer
        assert tokenizer is not None, "a chat has one"
        before, plain = self.modes.name, list[int]()
        table = Table("draft", "tokens", "seconds", "tokens/s", "tokens per round", "text", title="race")
        try:
            for draft in (PLAIN, *(drafts or (before,))):
                self.modes.use(draft)
                begin = perf_counter()
                label = "the current draft" if draft is None else draft
                stream = self.modes.stream(self.asked, self.params)
                statistics = self.modes.generator.statistics
                shown = StopStringFilter(StopStrings.of(self.params.stop_strings), tokenizer, self.asked)
                tokens = _quiet(stream, shown, total=self.params.max_new_tokens or 0, label=f"race: {label}").tokens
                seconds = perf_counter() - begin
                plain = tokens if draft == PLAIN else plain
                figures = f"{seconds:.2f}", f"{len(tokens) / seconds:.1f}", f"{statistics.tokens_per_round:.2f}"
                table.add_row(Text(label), str(len(tokens)), *figures, "the same" if tokens == plain else "another")
        finally:
            self.modes.use(before)
        console.err().print(table)

    def save(self, file: Path) -> None:
        """Write the conversation as JSON, or raise StorageError."""
        from paceline.decoder.weights.atomic_write import save_bytes

        said = {"system": self.conversation.system, "messages": self.conversation.turns}
        save_bytes(file, [json.dumps(said, ensure_ascii=False, indent=1).encode()])

    def load(self, file: Path) -> None:
        """Continue a conversation that `save` wrote; after a ConfigurationError the one before stays."""
        try:
            said = json.loads(file.read_text(encoding="utf-8"))
            system, turns = said["system"], said["messages"]
            roles = [turn["role"] for turn in turns if isinstance(turn["content"], str)]
            right = roles == ["user", "assistant"] * (len(turns) // 2) and (system is None or isinstance(system, str))
        except (OSError, ValueError, KeyError, TypeError):
            right = False
        if not right:
            raise ConfigurationError(f"/load: expected a file of /save, got {file}; give the name of one")
        self.conversation.system, self.conversation.turns = system, turns

    def _obey(self, name: str, value: str) -> bool:
        """Whether that was the end."""
        value = value.strip()
        err = console.err()
        if name in ("quit", "exit"):
            return True
        if name in ("draft", "mode") and value:
            self.modes.use(value)
        elif name == "race":
            self.race(value.split())
        elif name == "save" and value:
            self.save(Path(value))
        elif name == "load" and value:
            self.load(Path(value))
        elif name == "stats":
            err.print(console.statistics_table(*self.last) if self.last else "nothing was answered yet")
        elif name == "seed" and value.removeprefix("-").isdecimal():
            self.params = replace(self.params, seed=int(value))
        elif name == "system" and value:
            self.conversation.system = value
            self.conversation.clear()
        elif name == "reset":
            self.conversation.clear()
        else:
            console.say(err, HELP)
        return False


@command(app)
def bench(
    target: TargetFolder,
    draft: Annotated[
        str, typer.Option(help="Drafter: a folder (draft model, Medusa or EAGLE heads), with options (DIR:amp=f32).")
    ],
    prompts: Annotated[Path, typer.Option(help='File of JSON lines, each with a "prompt".')],
    *,
    loader: LoadOptions,
    k: Annotated[
        list[str] | None,
        typer.Option(help="Numbers of draft tokens per round to measure, such as 2,4; repeatable. Default: 2,4,6."),
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    num_prompts: NumPrompts = 6,
    as_json: AsJson = False,
) -> None:
    """Measure plain decoding, n-grams, a drafter at every length, and `generate` of transformers in one run."""
    with console.refusals():
        texts = read_prompts(prompts)[: max(0, num_prompts)]
        if max_new_tokens < 2:  # the first token comes with the prompt, and there would be no round to measure
            raise SamplingError(f"--max-new-tokens: expected at least 2, got {max_new_tokens}; raise it")
        if not texts:
            raise PromptError(
                f"--prompts: expected at least one prompt to measure with in {prompts}, got none; give JSON lines "
                "and a --num-prompts of 1 or more"
            )
        lengths = numbers(",".join(k or ["2,4,6"]), "--k")
        for length in lengths:
            checked(target, loader, config := SpeculativeConfig(draft=draft, k=length))
        if len(config.draft) != 1:
            raise ConfigurationError(f"--draft: expected one drafter, got {draft!r}; give a folder")
        from paceline.experiments.bench import bench_pair  # loads much that the other commands do not need
        from paceline.experiments.config import LOAD

        given = {name: value for name, value in asdict(loader).items() if value not in (None, ()) and name in LOAD}
        figures = bench_pair(
            target, draft, texts, k=lengths, max_new_tokens=max_new_tokens, load=given, batch_size=loader.slots
        )
    console.values("bench", figures, as_json=as_json)
