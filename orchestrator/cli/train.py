"""`paceline train`, `medusa-tree`, `convert-medusa` and `convert-eagle`: options and wiring of heads.

The work is in the heads' folders.
"""

from __future__ import annotations

import json
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console
from paceline.cli.options import LAYOUT, AsJson, MaxNewTokens, TargetFolder, checked, command, load, read_prompts
from paceline.core.errors import ConfigurationError, PromptError
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.options import LoadOptions
from paceline.draft.dflash.config import DFlashHeadOptions
from paceline.draft.options import PardOptions
from paceline.eagle.config import EagleHeadOptions, EagleTraining
from paceline.heads.options import EVAL_SAMPLES, BlockTraining, CachedTextOptions
from paceline.medusa.config import MedusaConfig, MedusaTexts, MedusaTraining
from paceline.outputs import GenerationResult
from paceline.registry import resolve
from paceline.text.chat import chat_answers
from paceline.text.tokenizer import load_tokenizer, prompt_ids

if TYPE_CHECKING:
    import numpy as np

    from paceline.auto import SamplingDecoder
    from paceline.heads.features import Conversation, PartProgress, TrainingData
    from paceline.medusa import search
    from paceline.medusa.drafter import MedusaDrafter

_STOPPED = "stopped before the end: run the same command again to resume"

DataDtype = Annotated[str | None, typer.Option(help="Token id type of .bin files without a header: uint16 or uint32.")]

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class TrainingFiles:
    """Target, data and folders of a training, and how its result is printed."""

    target: TargetFolder
    data: Annotated[
        tuple[Path, ...],
        typer.Option(
            help="Training data: text, .bin with token ids, .jsonl with chats, a trace, or a folder of SpecForge's or "
            "speculators' hidden states; repeatable."
        ),
    ]
    out: Annotated[Path, typer.Option(help="Folder for the trained heads.")]
    work_dir: Annotated[Path | None, typer.Option(help="Folder for intermediate files. Default: OUT/work.")] = None
    data_dtype: DataDtype = None
    as_json: AsJson = False

    def read(self) -> TrainingData:
        return training_data(self.data, self.target, dtype=self.data_dtype)

    def make_work(self) -> Path:
        """Make the folders. -> that of intermediate files"""
        _results(self.out)
        return _results(self.work_dir or self.out / "work")

    def show(self, title: str, found: dict[str, object] | None) -> None:
        """Print what was measured; None: exit as unfinished."""
        if found is None:
            console.say(console.err(), _STOPPED)
            raise typer.Exit(console.UNFINISHED)
        console.values(title, found, as_json=self.as_json)


@dataclass(frozen=True, slots=True)
class MedusaHeadOptions:
    """Sizes of the Medusa heads to train."""

    heads: Annotated[
        int, typer.Option("--num-heads", help="Number of heads, that is of tokens to predict after the target's own.")
    ] = 4
    layers: Annotated[int, typer.Option("--num-layers", help="Number of residual blocks per head.")] = 1
    tie_lm_head: Annotated[
        bool, typer.Option(help="Use the target's output layer; otherwise each head has its own.")
    ] = True


@command(app, "medusa")
def medusa(files: TrainingFiles, *, heads: MedusaHeadOptions, texts: MedusaTexts, training: MedusaTraining) -> None:
    """Train Medusa heads on a frozen target, and print how often each head is right."""
    with console.refusals():
        sizes = ModelConfig.from_pretrained(files.target)
        config = MedusaConfig(
            heads.heads, heads.layers, sizes.hidden_size, sizes.vocab_size, heads.tie_lm_head, base=files.target.name
        )
        texts.check_room(sizes.max_position_embeddings, config.heads)
        given = files.read()
        texts.check_data(marked=given.marked)
        work = files.make_work()
        from paceline.heads.frozen_model import FrozenTarget
        from paceline.heads.trainer import distributed
        from paceline.medusa import train

        with distributed(training.device), _reports("training Medusa heads") as report, _until_terminated():
            frozen = FrozenTarget(files.target, precision=training.precision, device=training.device)
            states = train.gather(frozen, given, texts, work=work, report=report)
            accuracy = train.train(
                frozen,
                config,
                training,
                states=states,
                work=work,
                out=files.out,
                prompt=texts.prompt_length,
                report=report,
            )
    found = None if accuracy is None else {"heads": heads.heads, "places": accuracy.places, "top": accuracy.top()}
    files.show("top-1 and top-10 by head", found)


@contextmanager
def _reports(label: str) -> Iterator[PartProgress]:
    """Progress bar with the current step of the work; off a terminal, a line every tenth of it."""
    with console.bar(console.err(), label) as shown:
        last = [("", 0)]

        def report(what: str, done: int, total: int) -> None:
            tenth = (what.split(",")[0], 10 * done // max(1, total))
            if tenth != last[0]:
                last[0] = tenth
                shown.step(f"{what} ({done} of {total})")
            shown.reach(done, total, what)

        yield report


@contextmanager
def _until_terminated() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that what was learnt is kept; a second one ends the process at once."""
    before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

    def end(number: int, _: object) -> None:
        signal.signal(number, before)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SystemExit:
        console.say(console.err(), _STOPPED)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _results(folder: Path) -> Path:
    """Make a folder for results, before there are any, or raise ConfigurationError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"--out: {folder} cannot be created ({error.strerror}); give another folder"
        ) from error
    return folder


def token_stream(paths: Sequence[Path], target: Path, *, dtype: str | None = None) -> np.ndarray:
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
        raise ConfigurationError(
            f"--data: expected text, got none in {', '.join(map(str, paths))}; give text files or a folder of them"
        )
    stream = np.concatenate(parts)
    if stream.max() >= size:
        raise ConfigurationError(
            f"--data: expected token ids below {size}, the vocabulary of {target}, got {stream.max()}; use data of "
            "its own tokenizer"
        )
    return stream


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in {".py", ".txt", ".md"} and file.is_file())
    if not path.is_file():
        raise ConfigurationError(
            f"--data: {path} does not exist; give text files, .bin files of token ids, or a folder"
        )
    return [path]


def training_data(paths: Sequence[Path], target: Path, *, dtype: str | None = None) -> TrainingData:
    """Read conversations (.jsonl files and traces), a folder of hidden states, or a stream (`token_stream`, whose error
    is raised for other rows and for several kinds, too).
    """
    import numpy as np

    from paceline.heads.features import TrainingData, feature_files

    states = [path for path in paths if path.is_dir() and feature_files(path) and not _files(path)]
    chats = [path for path in paths if path.is_file() and path.suffix in (".jsonl", ".gz")]
    if (states and len(paths) > 1) or (chats and len(chats) < len(paths)):
        raise ConfigurationError(
            "--data: expected chats and traces, or streams of text, or one folder of hidden states, got several kinds; "
            "train on one of them"
        )
    if states:
        return TrainingData.of_files(states[0])
    if not chats:
        return TrainingData(token_stream(paths, target, dtype=dtype))
    texts = tuple(text for path in chats for text in _conversations(path, target))
    if not texts:
        raise ConfigurationError(f"--data: expected conversations, got none in {', '.join(map(str, chats))}; give some")
    return TrainingData(np.concatenate([text.tokens for text in texts]), texts)


def _conversations(path: Path, target: Path) -> Iterator[Conversation]:
    import numpy as np

    from paceline.heads.features import Conversation

    size = ModelConfig.from_pretrained(target).vocab_size
    if path.suffix != ".jsonl":
        from paceline.experiments.trace import load_trace

        trace = load_trace(path)
        if trace.vocab_size != size:
            raise ConfigurationError(
                f"--data: expected a trace of a target with {size} ids, got {trace.vocab_size} in {path}; use a trace "
                "of this target"
            )
        for one in trace.texts:
            answer = [False] * len(one.prompt) + [True] * len(one.tokens)
            yield Conversation(np.array([*one.prompt, *one.tokens], dtype=np.int32), np.array(answer))
        return
    tokenizer = load_tokenizer(target)
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            ids, answer = chat_answers(tokenizer, _messages(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, PromptError) as error:
            raise ConfigurationError(
                f'--data: expected a conversation as {{"messages": [{{"role", "content"}}, ...]}}, got line {number} '
                f"of {path} ({error}); correct it"
            ) from error
        yield Conversation(np.array(ids, dtype=np.int32), np.array(answer))


_ROLES = {"human": "user", "gpt": "assistant"}


def _messages(row: dict[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a row: ``messages``, or ``conversations`` in the form of ShareGPT."""
    found = row["messages"] if "messages" in row else row["conversations"]
    turns = [(one.get("role") or one["from"], one["content"] if "content" in one else one["value"]) for one in found]
    if not all(isinstance(content, str) for _, content in turns):
        raise TypeError("a content that is not text")
    return [{"role": _ROLES.get(role, role), "content": content} for role, content in turns]


def _train(
    label: str,
    trainer: str,
    files: TrainingFiles,
    *,
    head: EagleHeadOptions | DFlashHeadOptions | PardOptions,
    check: Callable[[ModelConfig], None],
    texts: CachedTextOptions,
    training: BlockTraining | EagleTraining,
) -> None:
    """Read the data, train, and print the acceptance. ``trainer``: path of the function that trains such a head."""
    with console.refusals():
        given = files.read()
        check(ModelConfig.from_pretrained(files.target))
        work = files.make_work()
        from paceline.heads.trainer import distributed, rank

        with distributed(training.device), _reports(f"training {label}") as report, _until_terminated():
            shares = resolve(trainer)(
                files.target,
                given,
                head,
                texts=texts,
                options=training,
                work=work,
                out=files.out,
                report=lambda done, steps, loss: report(f"training, loss {loss:.3f}", done, steps),
            )
            if rank():
                return
    version = {"version": head.version} if isinstance(head, EagleHeadOptions) else {}
    files.show(label, None if shares is None else {**version, "greedy chains": shares})


@command(app, "eagle")
def eagle(files: TrainingFiles, *, head: EagleHeadOptions, texts: CachedTextOptions, training: EagleTraining) -> None:
    """Train an EAGLE head on a frozen target, and print its acceptance: greedy chains of 1, 2, ... right drafts."""
    from paceline.eagle.train import check

    label, own = f"an EAGLE-{head.version} head", partial(check, head, texts)
    _train(label, "paceline.eagle.train:train", files, head=head, check=own, texts=texts, training=training)


@command(app, "dflash")
def dflash(files: TrainingFiles, *, head: DFlashHeadOptions, texts: CachedTextOptions, training: BlockTraining) -> None:
    """Train a DFlash head on a frozen target, and print its acceptance: blocks with 1, 2, ... right drafts."""
    path = "paceline.draft.dflash.train:train_dflash"
    _train("a DFlash head", path, files, head=head, check=head.check, texts=texts, training=training)


@command(app, "pard")
def pard(files: TrainingFiles, *, decoder: PardOptions, texts: CachedTextOptions, training: BlockTraining) -> None:
    """Train a PARD decoder on a frozen target, and print its acceptance: blocks with 1, 2, ... right drafts."""
    path = "paceline.draft.pard_train:train_pard"
    _train("a PARD decoder", path, files, head=decoder, check=decoder.check, texts=texts, training=training)


@app.command(name="convert-eagle")
def convert_eagle(
    source: Annotated[Path, typer.Argument(help="Folder of the EAGLE head, in any layout.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    *,
    target: TargetFolder,
    layout: Annotated[str, typer.Option(help=LAYOUT + "eagle, nxd or speculators.")] = "paceline",
) -> None:
    """Convert an EAGLE head to another layout: Paceline's, the EAGLE repository's, NxD Inference's or speculators'."""
    with console.refusals():
        from paceline.eagle import checkpoint
        from paceline.heads.frozen_model import FrozenTarget

        frozen, sizes = FrozenTarget(target), ModelConfig.from_pretrained(target)
        tensors = checkpoint.TargetTensors(frozen.embedding, frozen.output.detach(), sizes.num_layers)
        checkpoint.convert(source, _results(out), sizes, layout=layout, tensors=tensors, base=str(target))
    console.say(console.out(), str(out))


_PROMPT = 64  # tokens of a prompt that is cut out of data


@dataclass(frozen=True, slots=True)
class TreeSearchOptions:
    """The tree, and the texts that it is searched and checked on."""

    nodes: Annotated[int, typer.Option(help="Number of nodes in the tree.")] = 64
    prompts: Annotated[Path | None, typer.Option(help='Prompts to evaluate on: JSON lines, each with a "prompt".')] = (
        None
    )
    data: Annotated[
        tuple[Path, ...] | None,
        typer.Option(help="Data to cut prompts from instead: text or .bin; repeatable."),
    ] = None
    data_dtype: DataDtype = None
    eval_samples: Annotated[int, typer.Option(help=EVAL_SAMPLES)] = 64
    max_new_tokens: MaxNewTokens = 128

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.max_new_tokens < 1:
            raise ConfigurationError(
                f"expected --nodes and --max-new-tokens of at least 1, got {self.nodes} and {self.max_new_tokens}; "
                "raise them"
            )


@command(app, "medusa-tree", hidden={"batch_size", "n_positions"})
def medusa_tree(
    target: TargetFolder,
    heads: Annotated[Path, typer.Option(help="Folder of the heads.")],
    out: Annotated[Path, typer.Option(help="File for the choices.")],
    *,
    tree: TreeSearchOptions,
    loader: LoadOptions,
    as_json: AsJson = False,
) -> None:
    """Build the best tree of a given size for the accuracy of heads, measured on the target's own greedy output.

    Half of the texts are for the search. The other half is decoded with the tree, to see whether the expectation
    holds.
    """
    with console.refusals():
        if out.is_dir():
            raise ConfigurationError(f"--out: expected a file for the choices, got the folder {out}; give a file")
        rows = _prompts(target, tree) if tree.eval_samples > 1 else []
        if len(rows) < 2:
            raise ConfigurationError(
                "--data: expected at least two sequences (one half to search with, one half to check on), got "
                "fewer; give more"
            )
        _results(out.parent)
        from paceline.medusa.drafter import MedusaDrafter

        length = tree.max_new_tokens
        decoder = load(checked(target, replace(loader, n_positions=max(map(len, rows)) + length)))
        searched, held_out = rows[::2], rows[1::2]
        best, independent = _search(decoder, target, heads, rows=searched, nodes=tree.nodes, length=length)
        best.choices.write(out)
        drafter = MedusaDrafter.from_pretrained(heads, decoder, draft_tree=best.choices)
        taus = _run(decoder, drafter, held_out, length=length)
    figures = {
        "nodes": len(best.choices),
        "depth": best.choices.depth,
        "expected_tau": round(best.tau, 3),
        "expected_tau_if_heads_were_independent": round(1 + independent, 3),
        "measured_tau": round(statistics.fmean(taus), 3),
        "standard_error": round(statistics.stdev(taus) / len(taus) ** 0.5, 3) if len(taus) > 1 else None,
        "texts": [len(searched), len(held_out)],
    }
    console.values("tree", figures, as_json=as_json)


@app.command(name="convert-medusa")
def convert_medusa(
    source: Annotated[Path, typer.Argument(help="Folder of the Medusa heads, in any layout.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    *,
    target: TargetFolder,
    layout: Annotated[str, typer.Option(help=LAYOUT + "medusa or nxd.")] = "paceline",
) -> None:
    """Convert Medusa heads to another layout: Paceline's, that of Medusa's own code, or that of NxD Inference."""
    with console.refusals():
        from paceline.heads.frozen_model import FrozenTarget
        from paceline.medusa import checkpoint

        path = checkpoint.convert(source, _results(out), layout=layout, output=FrozenTarget(target).output.detach())
    console.say(console.out(), str(path))


def _search(
    decoder: SamplingDecoder, target: Path, medusa: Path, *, rows: list[list[int]], nodes: int, length: int
) -> tuple[search.Found, float]:
    """The tree, and what a search with independent heads would expect of it."""
    import torch

    from paceline.heads.frozen_model import FrozenTarget, Texts
    from paceline.medusa import checkpoint, search

    frozen = FrozenTarget(target)
    heads = checkpoint.heads(medusa, frozen.output, torch.float32)
    texts = []
    with console.bar(console.err(), "measuring the heads", len(rows)) as shown:
        for row in rows:
            text = decoder.sample([row], max_new_tokens=length)
            assert isinstance(text, torch.Tensor)
            states = frozen.states(text)
            texts.append(Texts(text, states, states).after(len(row)))
            shown.advance()
    measured = search.measure(heads, texts, frozen.output.detach())
    best = search.best(search.by_places(measured.ranks, top=search.TOP), nodes)
    return best, search.expected(best.choices, search.by_heads(measured.top()))


def _run(decoder: SamplingDecoder, drafter: MedusaDrafter, rows: list[list[int]], *, length: int) -> list[float]:
    """Tokens per round of every text, decoded with the tree."""
    from paceline.generator import SpeculativeGenerator

    generator = SpeculativeGenerator(drafter, decoder)
    taus = []
    with console.bar(console.err(), "decoding with the tree", len(rows)) as shown:
        for row in rows:
            result = generator.sample([row], max_new_tokens=length, return_dict=True)
            assert isinstance(result, GenerationResult)
            taus.append(result.statistics.tau)
            shown.advance()
    return taus


def _prompts(target: Path, tree: TreeSearchOptions) -> list[list[int]]:
    if (tree.prompts is None) == (not tree.data):
        raise PromptError(
            "--prompts: expected either --prompts or --data to evaluate on, got both or neither; give one of them"
        )
    if tree.prompts is None:
        from paceline.heads.features import cut

        stream = token_stream(tree.data or (), target, dtype=tree.data_dtype)
        return [[int(token) for token in row] for row in cut(stream, tree.eval_samples, _PROMPT, seed=1).tolist()]
    tokenizer = load_tokenizer(target)
    texts = read_prompts(tree.prompts)[: tree.eval_samples]
    return [prompt_ids(tokenizer, text, f"prompt {index} of {tree.prompts}") for index, text in enumerate(texts, 1)]
