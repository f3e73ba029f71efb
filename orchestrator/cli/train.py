"""`paceline train medusa`: the command line of training. Options and their wiring; the work is in the heads' folder."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console, progress
from paceline.cli.config_options import command
from paceline.core.errors import ConfigurationError
from paceline.decoder.models.config import ModelConfig
from paceline.medusa.config import MedusaConfig
from paceline.medusa.options import MedusaTexts, MedusaTraining
from paceline.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import numpy as np

    from paceline.training.features import Report

STOPPED = "stopped before the end: run the same command again to resume"

Target = Annotated[Path, typer.Option(help="Folder of the model the heads are for.")]
Data = Annotated[list[Path], typer.Option(help="Text, or .bin with token ids; a file or folder; repeatable.")]
DataDtype = Annotated[
    str | None, typer.Option(help="Of the ids in .bin files that have no header: uint16 or uint32. Others say it.")
]
Out = Annotated[Path, typer.Option(help="Folder for the heads.")]
WorkDir = Annotated[Path | None, typer.Option(help="Folder for intermediate files; default: OUT/work.")]

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class MedusaHeadOptions:
    """Which Medusa heads are trained."""

    heads: int = field(default=4, metadata={"help": "How many tokens ahead, after the target's own."})
    layers: int = field(default=1, metadata={"help": "Residual blocks of a head."})
    tie_lm_head: bool = field(
        default=True, metadata={"help": "Use the target's output layer; otherwise one for each head."}
    )


@command(app, "medusa")
def medusa(
    target: Target,
    data: Data,
    out: Out,
    *,
    heads: MedusaHeadOptions,
    texts: MedusaTexts,
    training: MedusaTraining,
    work_dir: WorkDir = None,
    data_dtype: DataDtype = None,
) -> None:
    """Train Medusa heads on a frozen target. The last line of stdout is a JSON object with the accuracies."""
    with console.refusals():
        sizes = ModelConfig.from_pretrained(target)
        config = MedusaConfig(
            heads.heads, heads.layers, sizes.hidden_size, sizes.vocab_size, heads.tie_lm_head, base=target.name
        )
        texts.check(config, sizes)
        stream = token_stream(data, target, dtype=data_dtype)
        results(out)
        work = results(work_dir or out / "work")
        from paceline.medusa import train
        from paceline.training.frozen_model import FrozenTarget

        frozen = FrozenTarget(target, precision=training.precision, device=training.device)
        with reports("training Medusa heads") as report, until_terminated():
            states = train.gather(frozen, stream, texts, work=work, report=report)
            accuracy = train.train(
                frozen,
                config,
                training,
                states=states,
                work=work,
                out=out,
                first=texts.prompt_length - 1,
                report=report,
            )
    if accuracy is None:
        console.say(console.err(), STOPPED)
        raise typer.Exit(3)
    table = accuracy.top()
    console.err().print(console.values_table("top-1 and top-10 by head", {str(i): row for i, row in enumerate(table)}))
    typer.echo(json.dumps({"heads": heads.heads, "places": accuracy.places, "top": table}))


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


def token_stream(paths: list[Path], target: Path, *, dtype: str | None = None) -> np.ndarray:
    """All tokens of files, end to end, as [n] int32. Folders are read for .py, .txt and .md.

    ``dtype``: of ids in .bin files without a header (`paceline.decoder.token_files`).

    Raises:
        ConfigurationError: there is no such file, nothing in it, or ids that the target does not have.
    """
    import numpy as np

    from paceline.decoder.token_files import read_tokens

    files = [file for path in paths for file in _files(path)]
    size = ModelConfig.from_pretrained(target).vocab_size
    tokenizer = load_tokenizer(target) if any(file.suffix != ".bin" for file in files) else None
    parts: list[np.ndarray] = []
    for file in files:
        if file.suffix == ".bin":
            parts.append(read_tokens(file, size, dtype=dtype))
        else:
            assert tokenizer is not None
            text = file.read_text(encoding="utf-8", errors="replace")
            parts.append(np.array(tokenizer.encode(text, verbose=False), dtype=np.int32))
    if not sum(map(len, parts)):
        raise ConfigurationError(f"no text in {', '.join(map(str, paths))}; give text files or a folder of them")
    stream = np.concatenate(parts)
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
