"""`paceline train medusa`: the command line of training. Options and their wiring; the work is in the heads' folder."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from paceline.cli import console, progress
from paceline.core.errors import ConfigurationError
from paceline.decoder.models.config import ModelConfig
from paceline.medusa import pipeline
from paceline.medusa.config import MedusaConfig
from paceline.medusa.corpus import FrozenTarget, Report
from paceline.medusa.training import TrainingOptions
from paceline.text.tokenizer import load_tokenizer

PRECISION = "Of products of matrices: f32, or bf16, which is faster on a CPU with instructions for it."
STOPPED = "stopped before the end: run the same command again to go on"

app = typer.Typer(help="Train heads for a target.", no_args_is_help=True, add_completion=False)


@app.command()
def medusa(
    target: Annotated[Path, typer.Option(help="Folder of the model the heads are for.")],
    data: Annotated[
        list[Path], typer.Option(help="Text, or .bin with uint16 token ids; a file or folder; repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the heads.")],
    heads: Annotated[int, typer.Option(help="How many tokens ahead, after the target's own.")] = 4,
    layers: Annotated[int, typer.Option(help="Residual blocks of a head.")] = 1,
    tied: Annotated[bool, typer.Option("--tied/--own", help="Use the target's output layer, or one per head.")] = True,
    tokens: Annotated[int, typer.Option(help="Tokens of the data to train on.")] = 300_000,
    generated: Annotated[int, typer.Option(help="Tokens of the target's own continuations to train on.")] = 0,
    temperature: Annotated[list[float] | None, typer.Option(help="Of those, by turns. Default: 0 and 1.")] = None,
    epochs: Annotated[float, typer.Option(help="Passes over all of it.")] = 1.0,
    window: Annotated[int, typer.Option(help="Tokens of one text.")] = 256,
    measured: Annotated[int, typer.Option(help="Texts to measure the accuracy on.")] = 64,
    rows: Annotated[int, typer.Option(help="Texts in a step.")] = 8,
    rate: Annotated[float, typer.Option(help="Largest learning rate.")] = 1e-3,
    precision: Annotated[str, typer.Option(help=PRECISION)] = "f32",
    labels: Annotated[str, typer.Option(help="target: its distribution; text: the tokens that came.")] = "target",
    minutes: Annotated[float | None, typer.Option(help="Stop after so long; run again to go on.")] = None,
    work: Annotated[Path | None, typer.Option(help="Folder for what is kept meanwhile; default: OUT/work.")] = None,
) -> None:
    """Train Medusa heads on a frozen target. The last line of stdout is a JSON object with the accuracies."""
    with console.refusals():
        plan = pipeline.Plan(
            tokens=tokens,
            generated=generated,
            temperatures=tuple(temperature or (0.0, 1.0)),
            window=window,
            prompt=window // 4,
            measured=measured,
        )
        options = TrainingOptions(
            epochs=epochs, rows=rows, rate=rate, labels=labels, precision=precision, minutes=minutes
        )
        sizes = ModelConfig.from_pretrained(target)
        config = MedusaConfig(heads, layers, sizes.hidden_size, sizes.vocab_size, tied, base=target.name)
        plan.check(config, sizes)
        stream = token_stream(data, target)
        results(out)
        folder = results(work or out / "work")
        frozen = FrozenTarget(target)
        with reports("training Medusa heads") as report, until_terminated():
            states = pipeline.gather(frozen, stream, plan, work=folder, report=report)
            found = pipeline.train(
                frozen,
                config,
                options,
                states=states,
                work=folder,
                out=out,
                first=plan.prompt - 1,
                report=report,
            )
    if found is None:
        console.say(console.err(), STOPPED)
        raise typer.Exit(3)
    table = found.top()
    console.err().print(console.values_table("top-1 and top-10 by head", {str(i): row for i, row in enumerate(table)}))
    typer.echo(json.dumps({"heads": heads, "places": found.places, "top": table}))


@contextmanager
def reports(label: str) -> Iterator[Report]:
    """A bar for work that tells what it does and how far it is; off a terminal, a line every tenth of it."""
    with progress.bar(console.err(), label) as shown:
        last = [("", 0)]

        def report(what: str, done: int, total: int) -> None:
            tenth = (what.split(",")[0], 10 * done // max(1, total))
            if tenth != last[0]:
                last[0] = tenth
                shown.step(f"{what} ({done} of {total})")
            shown.reach(done, total, what)

        yield report


@contextmanager
def until_terminated() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that what was learnt is kept; a second one ends the process at once."""
    before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

    def end(number: int, _: object) -> None:
        signal.signal(number, before)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SystemExit:
        console.say(console.err(), STOPPED)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def results(folder: Path) -> Path:
    """Make a folder for results, before there are any.

    Raises:
        ConfigurationError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be made a folder ({error.strerror}); give another one") from error
    return folder


def token_stream(paths: list[Path], target: Path) -> np.ndarray:
    """All tokens of files, end to end, as [n] int32. Folders are read for .py, .txt and .md.

    Raises:
        ConfigurationError: there is no such file, nothing in it, or ids that the target does not have.
    """
    files = [file for path in paths for file in _files(path)]
    tokenizer = load_tokenizer(target) if any(file.suffix != ".bin" for file in files) else None
    parts: list[np.ndarray] = []
    for file in files:
        if file.suffix == ".bin":
            if file.stat().st_size % 2:
                raise ConfigurationError(f"{file} ends in the middle of a number: .bin files hold uint16 token ids")
            parts.append(np.fromfile(file, dtype=np.uint16).astype(np.int32))
        else:
            assert tokenizer is not None
            text = file.read_text(encoding="utf-8", errors="replace")
            parts.append(np.array(tokenizer.encode(text, verbose=False), dtype=np.int32))
    if not sum(map(len, parts)):
        raise ConfigurationError(f"no text in {', '.join(map(str, paths))}; give text files or a folder of them")
    stream, size = np.concatenate(parts), ModelConfig.from_pretrained(target).vocab_size
    if stream.max() >= size:
        raise ConfigurationError(
            f"the data hold the token id {stream.max()}, and {target} has {size} ids; give data of its own tokenizer"
        )
    return stream


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in {".py", ".txt", ".md"} and file.is_file())
    if not path.is_file():
        raise ConfigurationError(f"{path} does not exist; give text files, .bin files of token ids, or a folder")
    return [path]
