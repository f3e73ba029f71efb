"""Progress of long work: loading weights, compiling graphs, generating. A bar on a terminal, lines elsewhere.

Not here: what is loaded or compiled. Decoders report their graphs (`CompiledDecoder.on_graph`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from paceline.decoder.decoder import CompiledDecoder
    from paceline.decoder.graph_events import GraphEvent
    from paceline.decoder.graph_key import GraphKey


@dataclass(frozen=True, slots=True)
class GraphTime:
    """One graph that was made: compiled, or taken from the cache."""

    owner: str
    graph: str
    seconds: float
    compiled: bool


class Bar:
    """Steps of one piece of work. ``step`` names what is being done, ``advance`` counts what is done."""

    def __init__(self, console: Console, progress: Progress, task: TaskID, *, still: bool = False) -> None:
        self._console, self._progress, self._task, self._still = console, progress, task, still

    def step(self, label: str) -> None:
        """Say what is being done now."""
        self._progress.update(self._task, label=label)
        if not self._console.is_terminal:
            self._console.print(Text(label), soft_wrap=True)

    def reach(self, done: int, total: int, label: str | None = None) -> None:
        """So much is done; ``label``: of what, on a terminal."""
        self._progress.update(self._task, completed=done, total=total)
        if label is not None:
            self._progress.update(self._task, label=label)

    def advance(self, by: int = 1) -> None:
        """So much more is done."""
        self._progress.advance(self._task, by)
        if self._still:
            self._progress.refresh()


@contextmanager
def bar(console: Console, label: str, total: int | None = None, *, still: bool = False) -> Iterator[Bar]:
    """A bar that disappears when the work is done; on anything but a terminal a line for each step.

    ``still``: drawn only when something was done, so that drawing does not disturb what is being measured.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.fields[label]}", markup=False), BarColumn(), MofNCompleteColumn())
    progress = Progress(
        *columns,
        TimeElapsedColumn(),
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


@contextmanager
def loading(console: Console, folder: Path) -> Iterator[Callable[[int, int], None]]:
    """A bar for `AutoDecoder.from_pretrained(progress=...)`."""
    with bar(console, f"loading {folder}") as shown:
        yield shown.reach


@contextmanager
def watching(decoders: Mapping[str, CompiledDecoder], shown: Bar, graphs: list[GraphTime]) -> Iterator[None]:
    """Show every graph that these decoders make inside the block, and note it in ``graphs``."""

    def observer(owner: str) -> Callable[[GraphEvent], None]:
        compiling: set[GraphKey] = set()

        def observe(event: GraphEvent) -> None:
            if event.message:
                compiling.add(event.key)
                shown.step(f"{event.message} of the {owner}")
                return
            graphs.append(GraphTime(owner, str(event.key), event.seconds, event.key in compiling))
            shown.advance()

        return observe

    with ExitStack() as stack:
        for owner, decoder in decoders.items():
            stack.callback(setattr, decoder, "on_graph", decoder.on_graph)
            decoder.on_graph = observer(owner)
        yield


def compiling(
    console: Console, decoders: Mapping[str, CompiledDecoder], jobs: Sequence[Callable[[], None]]
) -> list[GraphTime]:
    """Run jobs that make graphs, such as `SpeculativeGenerator.compile`, under one bar.

    Returns the graphs they made.
    """
    graphs: list[GraphTime] = []
    prefills = sum(
        len(decoder.options.chunks if name == "target" else decoder.options.draft_chunks)
        for name, decoder in decoders.items()
    )
    rounds = len(decoders) - 1 + len(jobs)  # a graph for each draft, a verifying graph for each job
    with bar(console, "preparing graphs", prefills + rounds) as shown, watching(decoders, shown, graphs):
        for job in jobs:
            job()
    return graphs
