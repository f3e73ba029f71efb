"""Terminal output: streamed text, tables, one-line errors, and the progress of long work.

Progress is a bar on a terminal, lines elsewhere. Decoders report their graphs (`CompiledDecoder.on_graph`).
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.core.errors import PacelineError
from paceline.outputs import RequestOutput, Statistics
from paceline.registry import ACCEPTANCE_RULES
from paceline.text.stop_strings import StopStringFilter, StopStrings
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from paceline.decoder.decoder import CompiledDecoder
    from paceline.decoder.graph_key import GraphEvent, GraphKey

REFUSED = 2
"""Exit status of a command whose options or files are refused."""

UNFINISHED = 75
"""Exit status where time is over before all is done: EX_TEMPFAIL of sysexits.h, "try again"."""

_DRAFTED, _OWN, _PROMPT = "bold green", "", "dim"
_MARKS = ("\u2039", "\u203a")  # single angle quotation marks, rare in code


def out() -> Console:
    """Console for results (stdout)."""
    return Console(highlight=False)


def err() -> Console:
    """Console for everything but results (stderr)."""
    return Console(stderr=True, highlight=False)


@contextmanager
def refusals() -> Iterator[None]:
    """Turn our errors into one line and exit status 2, without a traceback."""
    try:
        yield
    except PacelineError as error:
        say(err(), "error: " + " ".join(str(error).split()), style="red")
        raise typer.Exit(REFUSED) from error


def say(console: Console, line: str, *, style: str = "") -> None:
    """One line of plain text, however long."""
    console.print(Text(line, style=style), soft_wrap=True)


class TextView:
    """Writes a text as its tokens come, drafted ones in another style than the target's own.

    On a terminal styles tell them apart, bold as well as colour. Elsewhere the bare text is written, byte for byte, or,
    with ``marks``, the drafted parts between quotation marks. A stop string is not written, as in answers over HTTP.
    """

    def __init__(
        self,
        console: Console,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        marks: bool = False,
        stop: StopStrings | None = None,
    ) -> None:
        self._console, self._text = console, StopStringFilter(stop, tokenizer, prompt)
        self._marks = marks and not console.is_terminal
        self._open = False

    def prompt(self, text: str) -> None:
        self._write(text, _PROMPT)

    def show(self, event: RequestOutput) -> str:
        """The tokens of an event; returns their text."""
        pieces = []
        for index, token in enumerate(event.tokens):
            drafted = index < event.accepted
            pieces.append(self._piece(self._text.push(token), drafted=drafted))
        if event.finish_reason is not None:
            pieces.append(self._piece(self._text.flush(), drafted=False))
            self._mark(drafted=False)
        return "".join(pieces)

    def legend(self) -> str:
        if self._marks:
            return f"{_MARKS[0]}drafted and accepted{_MARKS[1]}, the rest is the target's own"
        return legend()

    def _piece(self, text: str, *, drafted: bool) -> str:
        if text:
            self._mark(drafted=drafted)
            self._write(text, _DRAFTED if drafted else _OWN)
        return text

    def _mark(self, *, drafted: bool) -> None:
        if self._marks and drafted != self._open:
            self._open = drafted
            self._write(_MARKS[0] if drafted else _MARKS[1], _OWN)

    def _write(self, text: str, style: str) -> None:
        if self._console.is_terminal:
            self._console.print(Text(_harmless(text), style=style), end="", soft_wrap=True)
        else:
            self._console.file.write(text)
        self._console.file.flush()


def legend() -> str:
    """Legend of the styles of a `TextView` on a terminal."""
    return f"[{_DRAFTED}]bold green[/]: drafted and accepted; plain: the target's own."


def statistics_table(statistics: Statistics, seconds: float | None = None) -> Table:
    table = Table("what", "value", title="statistics")
    rows = {
        "new tokens": str(statistics.new_tokens),
        "rounds": str(statistics.num_rounds),
        "rounds with a draft": str(statistics.num_drafts),
        "draft tokens": str(statistics.num_draft_tokens),
        "accepted tokens": f"{statistics.num_accepted_tokens} ({statistics.acceptance_rate:.0%})",
        "accepted by position": acceptance_by_position(statistics) or "-",
        "mean acceptance length (tau)": f"{statistics.mean_acceptance_length:.2f}",
        "tokens per round": f"{statistics.tokens_per_round:.2f}",
        "seconds in prefill": f"{statistics.prefill_seconds:.3f}",
        "seconds in drafting": f"{statistics.draft_seconds:.3f}",
        "seconds in verification": f"{statistics.verify_seconds:.3f}",
        "seconds on the host": f"{statistics.host_seconds:.3f}",
    }
    if statistics.draft_lengths:
        counts = Counter(statistics.draft_lengths)
        rows["rounds at each draft length"] = ", ".join(f"{length}: {counts[length]}" for length in sorted(counts))
    warning = acceptance_warning(statistics)
    if warning is not None:
        rows["acceptance rule"] = f"{statistics.acceptor}, {warning}"
    for name, one in statistics.drafters.items():
        rows[f"drafter {name}"] = (
            f"{one.num_drafts} drafts, length {one.mean_acceptance_length:.2f} of {one.num_scored} proposals"
        )
    if seconds:
        rows["tokens/s, prefill included"] = f"{statistics.new_tokens / seconds:.1f}"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def acceptance_warning(statistics: Statistics) -> str | None:
    """Return the warning for text that does not follow the target's distribution, or None if it does."""
    if statistics.lossless:
        return None
    row = ACCEPTANCE_RULES.get(statistics.acceptor)
    return row.warning if row is not None else "LOSSY: the text does not follow the target's distribution"


def acceptance_by_position(statistics: Statistics) -> str:
    """Share of the drafts whose first, second, ... token was accepted."""
    pairs = zip(statistics.num_accepted_tokens_per_pos, statistics.num_draft_tokens_per_pos, strict=True)
    return "  ".join(f"{accepted / drafted:.0%}" for accepted, drafted in pairs if drafted)


def table(*columns: str, rows: Iterable[Iterable[object]], title: str | None = None) -> None:
    """Print a table of plain text."""
    made = Table(*columns, title=title)
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    out().print(made)


def values(title: str, found: Mapping[str, object], *, as_json: bool) -> None:
    """Print a nested mapping as one JSON object, or as a table with one line for each leaf."""
    if as_json:
        typer.echo(json.dumps(found))
        return
    table("what", "value", rows=((name, _shown(value)) for name, value in _leaves(found, "")), title=title)


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _leaves(value: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _harmless(text: str) -> str:
    """Model output is untrusted: no control character but newline and tab reaches a terminal."""
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


class Bar:
    """Steps of one piece of work. ``step`` names what is being done, ``advance`` counts what is done."""

    def __init__(self, console: Console, progress: Progress, task: TaskID, *, still: bool = False) -> None:
        self._console, self._progress, self._task, self._still = console, progress, task, still

    def step(self, label: str) -> None:
        self._progress.update(self._task, label=label)
        if not self._console.is_terminal:
            self._console.print(Text(label), soft_wrap=True)

    def reach(self, done: int, total: int, label: str | None = None) -> None:
        """Set the progress to ``done``; ``label``: of which work, on a terminal."""
        self._progress.update(self._task, completed=done, total=total)
        if label is not None:
            self._progress.update(self._task, label=label)

    def advance(self, by: int = 1) -> None:
        """Add ``count`` to the progress."""
        self._progress.advance(self._task, by)
        if self._still:
            self._progress.refresh()


@contextmanager
def bar(console: Console, label: str, total: int | None = None, *, still: bool = False) -> Iterator[Bar]:
    """A bar with the time left, which disappears when the work is done; elsewhere a line for each step.

    ``still``: drawn only when something was done, so that drawing does not disturb what is being measured.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (SpinnerColumn(), TextColumn("{task.fields[label]}", markup=False), BarColumn(), MofNCompleteColumn())
    progress = Progress(
        *columns,
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        auto_refresh=not still,
        refresh_per_second=4,
        disable=not console.is_terminal,
    )
    with progress:
        shown = Bar(console, progress, progress.add_task("", total=total, label=label), still=still)
        shown.step(label)
        yield shown


def compiling(
    console: Console, decoders: Mapping[str, CompiledDecoder], jobs: Sequence[Callable[[], None]]
) -> list[tuple[str, str, str, str]]:
    """Run jobs that make graphs, such as `SpeculativeGenerator.compile`, under one bar. -> of every graph its decoder,
    its name, seconds, and whether it was compiled or came from the cache
    """
    graphs: list[tuple[str, str, str, str]] = []

    def observer(owner: str) -> Callable[[GraphEvent], None]:
        compiling: set[GraphKey] = set()

        def observe(event: GraphEvent) -> None:
            if event.message:
                compiling.add(event.key)
                shown.step(f"{event.message} of the {owner}")
                return
            how = "compiled" if event.key in compiling else "from the cache"
            graphs.append((owner, str(event.key), f"{event.seconds:.1f}", how))
            shown.advance()

        return observe

    prefills = sum(
        len(decoder.options.chunks if name == "target" else decoder.options.draft_chunks)
        for name, decoder in decoders.items()
    )
    rounds = len(decoders) - 1 + len(jobs)  # a graph for each draft, a verifying graph for each job
    with bar(console, "preparing graphs", prefills + rounds) as shown, ExitStack() as stack:
        for owner, decoder in decoders.items():
            stack.callback(setattr, decoder, "on_graph", decoder.on_graph)
            decoder.on_graph = observer(owner)
        for job in jobs:
            job()
    return graphs
