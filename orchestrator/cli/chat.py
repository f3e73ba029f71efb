"""`paceline chat`: a conversation on the terminal. How text looks is in `paceline.cli.console`."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console, progress
from paceline.cli.config_options import command
from paceline.cli.load import checked, load, load_draft
from paceline.cli.options import LoaderOptions, SamplingOptions, TargetFolder
from paceline.config import SpeculativeConfig
from paceline.core.errors import PacelineError
from paceline.decoder.backends.registry import BACKENDS
from paceline.draft_spec import parse_draft
from paceline.engine.request import SamplingParams
from paceline.outputs import Statistics
from paceline.text.chat import Conversation
from paceline.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from paceline.auto import SamplingDecoder
    from paceline.generator import SpeculativeGenerator

app = typer.Typer()

PLAIN = "plain"
_OF_DRAFTS = ("acceptor", "synthetic_acceptance", "fused")
_OF_MODELS = frozenset({"confidence_threshold", "vocabulary"})

HELP = """/mode DRAFT   who drafts from now on, as --draft says it: plain, ngram, suffix, a folder, DIR:k=4
/stats        counts and times of the last answer
/seed N       the seed of the answers that follow
/system TEXT  the system message; begins anew
/reset        forget what was said
/help, /quit  this text; the end (so does Ctrl-D). Ctrl-C stops an answer."""

System = Annotated[str | None, typer.Option(help="The system message; default: the template's own.")]


@command(app)
def chat(
    target: TargetFolder,
    config: SpeculativeConfig,
    *,
    sampling: SamplingOptions,
    loader: LoaderOptions,
    system: System = None,
) -> None:
    """Talk to a chat model: a line is a question, /help lists the commands."""
    with console.refusals():
        params, found = sampling.params(), checked(target, loader, config)
        tokenizer = load_tokenizer(target)
        params = replace(params, tokenizer=tokenizer)
        decoder = load(found)
        longest = decoder.n_positions - (params.max_new_tokens or 0)
        modes = Modes(decoder, config, compiled=BACKENDS[loader.backend].compiles)
        session = Session(modes, Conversation(tokenizer, longest, system), params)
        modes.use(None)
        session.run()


@dataclass(slots=True)
class Modes:
    """Generators of one target by who drafts; each is made at its first use, with its graphs if they are compiled."""

    target: SamplingDecoder
    config: SpeculativeConfig
    compiled: bool
    generators: dict[str | None, SpeculativeGenerator] = field(default_factory=dict)
    current: str | None = None

    def use(self, draft: str | None) -> None:
        """Let that one draft; None: what the command line said.

        Raises:
            PacelineError: there is no such draft, or it does not fit the target. The one before stays.
        """
        if draft not in self.generators:
            config = self.config if draft is None else _of_mode(self.config, draft)
            generator, decoders = load_draft(self.target, config)
            if self.compiled:
                progress.compiling(console.err(), decoders, [generator.compile])
            self.generators[draft] = generator
        self.current = draft

    @property
    def generator(self) -> SpeculativeGenerator:
        """Of the mode that is in use."""
        return self.generators[self.current]


def _of_mode(config: SpeculativeConfig, draft: str) -> SpeculativeConfig:
    """The command line's configuration with another draft, without the options that mean nothing to it."""
    specs = () if draft == PLAIN else parse_draft(draft)
    dropped = {"draft", "k", *(() if specs else _OF_DRAFTS)}
    if not any(leaf.path for spec in specs for leaf in spec.leaves()):
        dropped |= _OF_MODELS
    kept = {name: getattr(config, name) for name in config.model_fields_set - dropped}
    return SpeculativeConfig(draft=specs, **kept)


@dataclass(slots=True)
class Session:
    """Reads lines, answers questions and obeys commands until the input is at its end."""

    modes: Modes
    conversation: Conversation
    params: SamplingParams
    last: tuple[Statistics, float] | None = None

    def run(self) -> None:
        """Read until the end."""
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  # gives `input` a history
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
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            typer.echo()
            return ""

    def reply(self, question: str) -> None:
        """Answer, shown while it is written; what Ctrl-C leaves of it stays in the conversation.

        Raises:
            PacelineError: the question is refused; the conversation is as before.
        """
        ids, forgotten = self.conversation.ask(question)
        if forgotten:
            console.say(console.err(), f"note: the first {forgotten} messages were forgotten to make room")
        tokenizer: Tokenizer = self.conversation.tokenizer
        view = console.TextView(console.out(), tokenizer, ids)
        pieces: list[str] = []
        begin = perf_counter()
        try:
            stream = self.modes.generator.stream([ids], params=self.params)
        except PacelineError:
            self.conversation.turns.pop()
            raise
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

    def _obey(self, name: str, value: str) -> bool:
        """Whether that was the end."""
        value = value.strip()
        err = console.err()
        if name in ("quit", "exit"):
            return True
        if name == "mode" and value:
            self.modes.use(value)
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
