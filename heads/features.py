"""Hidden states of the frozen target, from which heads learn: computed once and kept on disk.

`write_features` computes all of them before the training; `FeatureCache` computes those of a stream of tokens on
request, `Conversations` those of whole conversations; `FeatureFiles` reads those that SpecForge and speculators wrote.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.decoder.weights.atomic_write import atomic_write, save_tensors
from paceline.heads.frozen_model import FrozenTarget, Texts
from paceline.heads.options import TEXTS_PER_FILE, CachedTextOptions

PartProgress = Callable[[str, int, int], None]
"""(current task, amount done, total amount)"""


class Corpus(Protocol):
    """Batches of `TEXTS_PER_FILE` sequences with the target's hidden states, by number: `FeatureCache` or another
    source.

    key      identifies these sequences
    batches  number of different ones
    length   tokens of a sequence, on average
    """

    key: str
    batches: int

    @property
    def length(self) -> float: ...

    def batch(self, number: int) -> Texts: ...

    def eval_texts(self) -> Texts: ...


def write_features(folder: Path, name: str, *, batches: Sequence[Callable[[], Texts]], report: PartProgress) -> None:
    """Make batches of sequences with the target's last hidden states, and store each in a file.

    Existing files are kept, so that an interrupted run resumes.
    """
    for index, batch in enumerate(batches):
        path = folder / f"{name}-{index:04d}.safetensors"
        if path.is_file():
            continue
        report(f"states of the target ({name})", index, len(batches))
        made = batch().to("cpu")
        tensors = {"tokens": made.tokens.to(torch.int32), "states": made.last}
        save_tensors(path, tensors if made.counted is None else {**tensors, "counted": made.counted})
    report(f"states of the target ({name})", len(batches), len(batches))


def read_features(folder: Path, *, prompt: int = 0) -> list[Texts]:
    """Read the sequences of `write_features`, one entry per file, in order of their names; ``prompt``: see
    `Texts.after`; of conversations, the answers count.
    """
    texts = []
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        states, counted = tensors["states"], tensors.get("counted")
        one = Texts(tensors["tokens"].to(torch.int64), states, states, counted)
        texts.append(one.after(prompt) if prompt and counted is None else one)
    return texts


class FeatureCache:
    """Batches of sequences with the target's hidden states, by number, made on request and kept up to a limit.

    stream  [n], the token ids of the data, end to end
    key     identifies the target, data and options of these batches
    """

    def __init__(self, target: FrozenTarget, stream: np.ndarray, options: CachedTextOptions, *, folder: Path) -> None:
        room = len(stream) // options.length
        needed = TEXTS_PER_FILE + options.eval_samples
        if room < needed:
            raise ConfigurationError(
                f"data: expected at least {needed * options.length} tokens ({TEXTS_PER_FILE} sequences of "
                f"{options.length} to train on and {options.eval_samples} to evaluate on), got {len(stream)}; give "
                "more"
            )
        self._target, self._stream, self._options = target, stream, options
        self._order = np.random.default_rng(options.seed).permutation(room)
        self.batches = (room - options.eval_samples) // TEXTS_PER_FILE
        facts = {
            "target": target.fingerprint(),
            "layers": target.layers,
            "options": {**asdict(options), "feature_cache_gb": None},
            "data": hashlib.sha256(np.ascontiguousarray(stream).tobytes()).hexdigest(),
        }
        self.key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        self._folder = folder / self.key

    @property
    def length(self) -> int:
        return self._options.length

    def batch(self, number: int) -> Texts:
        """Return batch ``number`` (modulo the number of batches), from the disk if it is stored."""
        number %= self.batches
        path = self._folder / f"{number:06d}.safetensors"
        if path.is_file():
            tensors = load_file(path)
            texts = Texts(tensors["tokens"].to(torch.int64), tensors["last"], tensors.get("streams", tensors["last"]))
            return texts.to(self._target.device)
        texts = self._target.read(self._rows(range(number * TEXTS_PER_FILE, (number + 1) * TEXTS_PER_FILE)))
        self._keep(path, texts)
        return texts

    def eval_texts(self) -> Texts:
        """Sequences that the target continued greedily, from the end of the order: no batch contains them."""
        options = self._options
        length = options.prompt_length
        prompts = self._rows(range(len(self._order) - options.eval_samples, len(self._order)))[:, :length]
        return self._target.read(self._target.continued(prompts, options.length - length))

    def _rows(self, numbers: range) -> Tensor:
        length = self._options.length
        rows = [self._stream[at * length : (at + 1) * length] for at in self._order[numbers.start : numbers.stop]]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _keep(self, path: Path, texts: Texts) -> None:
        tensors = {"tokens": texts.tokens.to("cpu", torch.int32), "last": texts.last.cpu()}
        if texts.streams is not texts.last and self._target.layers:
            tensors["streams"] = texts.streams.cpu()
        size = sum(x.numel() * x.element_size() for x in tensors.values())
        with atomic_write(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        stored = sum(file.stat().st_size for file in path.parent.glob("*.safetensors"))
        if stored + size <= self._options.feature_cache_bytes:
            save_tensors(path, tensors)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Ids of a conversation, and which of them are of an answer: a drafter drafts nothing else."""

    tokens: np.ndarray
    answer: np.ndarray


_POOL = 64  # batches among which texts are sorted by length
_COUNTED = 512  # files whose ids are counted
_STEP = 32  # lengths of batches are multiples of it
_UNREADABLE = (
    OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, pickle.UnpicklingError, SafetensorError
)  # fmt: skip


class Conversations:
    """Batches of conversations with the target's hidden states; each is read from its beginning.

    measured  conversations to measure on
    longest   tokens of each that are read
    length    tokens of a text on average, with what fills the rows
    """

    def __init__(
        self,
        target: FrozenTarget,
        texts: Sequence[Conversation],
        measured: Sequence[Conversation],
        *,
        longest: int,
        seed: int = 0,
    ) -> None:
        self._target, self._longest, self._seed = target, longest, seed
        self._texts, self._measured = self._whole(texts), self._whole(measured)
        self.batches = len(self._texts) // TEXTS_PER_FILE
        if not self.batches or not self._measured:
            raise ConfigurationError(
                f"data: expected at least {TEXTS_PER_FILE} conversations with an answer among their first {longest} "
                f"tokens, and one to evaluate on, got {len(self._texts)} and {len(self._measured)}; give more, or "
                "a greater length"
            )
        self.length = sum(self._size(batch) for batch in self._epoch(0)) / self.batches
        parts = [part.tobytes() for text in self._texts for part in (text.tokens, text.answer)]
        self.key = hashlib.sha256(b"".join([target.fingerprint().encode(), *parts])).hexdigest()[:16]
        self._order: tuple[int, list[list[Conversation]]] | None = None

    def batch(self, number: int) -> Texts:
        """Return batch ``number``; the order changes after every ``batches`` of them."""
        epoch, index = divmod(number, self.batches)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._epoch(epoch)
        return self.read(self._order[1][index])

    def eval_texts(self) -> Texts:
        return self.read(self._measured)

    def read(self, texts: Sequence[Conversation]) -> Texts:
        return read_conversations(self._target, texts, self._size(texts))

    def _whole(self, texts: Sequence[Conversation]) -> list[Conversation]:
        short = [Conversation(text.tokens[: self._longest], text.answer[: self._longest]) for text in texts]
        return [text for text in short if text.answer[1:].any()]

    def _epoch(self, epoch: int) -> list[list[Conversation]]:
        rng = np.random.default_rng(self._seed + epoch)
        order = rng.permutation(len(self._texts))[: self.batches * TEXTS_PER_FILE]
        batches: list[list[Conversation]] = []
        for begin in range(0, len(order), _POOL * TEXTS_PER_FILE):
            pool = sorted(
                order[begin : begin + _POOL * TEXTS_PER_FILE].tolist(), key=lambda i: len(self._texts[i].tokens)
            )
            batches += [
                [self._texts[i] for i in pool[at : at + TEXTS_PER_FILE]] for at in range(0, len(pool), TEXTS_PER_FILE)
            ]
        return [batches[i] for i in rng.permutation(len(batches))]

    def _size(self, texts: Sequence[Conversation]) -> int:
        return -(-max(len(text.tokens) for text in texts) // _STEP) * _STEP


def read_conversations(target: FrozenTarget, texts: Sequence[Conversation], size: int) -> Texts:
    """Compute the states of conversations, in rows of ``size`` tokens."""
    tokens, answers = _rows(texts, size)
    return replace(target.read(tokens), counted=_counted(answers).to(target.device))


def _rows(texts: Sequence[Conversation], size: int) -> tuple[Tensor, Tensor]:
    """Return tokens [n, size] int64 and which are of an answer, bool; id 0 fills the rows."""
    tokens, answers = np.zeros((len(texts), size), dtype=np.int64), np.zeros((len(texts), size), dtype=bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)], answers[row, : len(text.tokens)] = text.tokens, text.answer
    return torch.from_numpy(tokens), torch.from_numpy(answers)


def _counted(answers: Tensor) -> Tensor:
    """Return the positions that predict a token of an answer. [n, S]"""
    return torch.nn.functional.pad(answers[:, 1:], (0, 1))


class FeatureFiles:
    """Batches of texts whose hidden states SpecForge or speculators wrote, a file for each text.

    SpecForge's files hold ``aux_hidden_state``, and ``hidden_state`` after the last norm; speculators' hold
    ``hidden_states`` of several layers, the last before that norm, perhaps in 8 bits, and no mask of the answers: all
    positions count, unless the file has a ``loss_mask``.
    """

    def __init__(self, target: FrozenTarget, folder: Path, *, longest: int, measured: int) -> None:
        files = feature_files(folder)
        self.batches = (len(files) - measured) // TEXTS_PER_FILE
        if self.batches < 1:
            raise ConfigurationError(
                f"data: expected at least {TEXTS_PER_FILE + measured} files of hidden states ({TEXTS_PER_FILE} to "
                f"train on, {measured} to evaluate on), got {len(files)} in {folder}; give more, or fewer eval_samples"
            )
        self._target, self._longest = target, longest
        self._files, self._measured = files[: len(files) - measured], files[len(files) - measured :]
        lengths = [len(self._one(file)[0].tokens) for file in self._files[: 4 * TEXTS_PER_FILE]]
        self.length = sum(lengths) / len(lengths)
        facts = [[file.name, file.stat().st_size] for file in files]
        self.key = hashlib.sha256(json.dumps([target.fingerprint(), longest, facts]).encode()).hexdigest()[:16]

    def batch(self, number: int) -> Texts:
        """Return batch ``number`` in the order of the files' names, from the first again after the last."""
        first = number % self.batches * TEXTS_PER_FILE
        return self._read(self._files[first : first + TEXTS_PER_FILE])

    def eval_texts(self) -> Texts:
        return self._read(self._measured)

    def _read(self, files: Sequence[Path]) -> Texts:
        texts, last, streams = zip(*(self._one(file) for file in files), strict=True)
        tokens, answers = _rows(texts, max(len(text.tokens) for text in texts))
        states = [torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in (last, streams)]
        return Texts(tokens, states[0], states[1], _counted(answers)).to(self._target.device)

    def _one(self, path: Path) -> tuple[Conversation, Tensor, Tensor]:
        try:
            made = _tensors(path)
            tokens = _ids(made)[: self._longest]
            if not 0 <= int(tokens.min()) <= int(tokens.max()) < self._target.output.shape[0]:
                raise IndexError(f"ids from {tokens.min()} to {tokens.max()}")
            if "aux_hidden_state" in made:
                streams, last = made["aux_hidden_state"], made["hidden_state"]
            else:
                states = made["hidden_states"]
                states = torch.stack(states, 1) if isinstance(states, list) else states
                if "hidden_states_scales" in made:  # 8 bits, with a scale for each token
                    states = states.float() * made["hidden_states_scales"]
                streams, last = states[:, :-1].flatten(1), self._target.normed(states[:, -1])
            answers = made.get("loss_mask", torch.ones(len(tokens))).flatten()[: len(tokens)].bool()
            width, size = len(self._target.layers) * self._target.output.shape[1], len(tokens)
            streams, last = (x.reshape(-1, x.shape[-1])[:size].bfloat16() for x in (streams, last))
            if width and streams.shape != (size, width):
                raise ValueError(f"states of width {streams.shape[-1]}, where the head reads {width}")
            if last.shape[0] != size:
                raise IndexError(f"{last.shape[0]} states; it has {size} tokens")
        except _UNREADABLE as error:
            raise ConfigurationError(
                f"data: expected a file of hidden states of SpecForge or speculators for this target, got {path} "
                f"({error}); write the files again, with the layers that the head reads"
            ) from error
        return Conversation(tokens.numpy().astype(np.int64), answers.numpy()), last, streams


def _tensors(path: Path) -> dict[str, Any]:
    made: dict[str, Any] = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    return made


def _ids(made: Mapping[str, Any]) -> Tensor:
    ids: Tensor = made["token_ids" if "token_ids" in made else "input_ids"].flatten()
    return ids


def feature_files(folder: Path) -> list[Path]:
    """Return the files of hidden states in a folder that SpecForge or speculators wrote, and its subfolders."""
    found = [file for file in folder.rglob("*") if file.suffix in {".ckpt", ".pt", ".safetensors"}]
    return sorted(found, key=lambda file: (len(file.name), file.name, str(file)))


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Texts to train on: a stream of token ids [n], conversations, or a folder of files with hidden states."""

    stream: np.ndarray
    texts: tuple[Conversation, ...] = ()
    states: Path | None = None

    @classmethod
    def of_files(cls, folder: Path) -> TrainingData:
        ids = []
        for file in feature_files(folder)[:_COUNTED]:
            try:
                ids.append(_ids(_tensors(file)).numpy().astype(np.int32))
            except _UNREADABLE as error:
                raise ConfigurationError(
                    f"data: expected a folder of hidden states of SpecForge or speculators, got {file} ({error}); give "
                    "their folder, or one of text alone"
                ) from error
        return cls(np.concatenate(ids), states=folder)

    def counts(self, size: int) -> Tensor:
        """Return how often every id below ``size`` occurs, [V]."""
        return torch.from_numpy(np.bincount(self.stream[(self.stream >= 0) & (self.stream < size)], minlength=size))

    def corpus(self, target: FrozenTarget, options: CachedTextOptions, *, folder: Path) -> Corpus:
        """Return the batches of these texts with the target's states, kept in ``folder``."""
        if self.states is not None:
            return FeatureFiles(target, self.states, longest=options.length, measured=options.eval_samples)
        if not self.texts:
            return FeatureCache(target, self.stream, options, folder=folder)
        order = np.random.default_rng(options.seed).permutation(len(self.texts)).tolist()
        mixed, kept = [self.texts[index] for index in order], len(order) - options.eval_samples
        seed = options.seed
        return Conversations(target, mixed[: max(0, kept)], mixed[max(0, kept) :], longest=options.length, seed=seed)

    @property
    def marked(self) -> bool:
        """Whether the texts tell which tokens are learnt, as conversations and hidden states do."""
        return bool(self.texts) or self.states is not None

    def skip(self, options: CachedTextOptions) -> int:
        """Return the positions of a text that are not measured; in conversations the answers tell."""
        return 0 if self.marked else options.prompt_length


def cut(stream: np.ndarray, count: int, length: int, *, seed: int) -> Tensor:
    """Cut sequences from evenly spread positions of a token stream, in random order. -> [count, length] int64"""
    room = len(stream) // length
    if count > room:
        raise ConfigurationError(
            f"data: expected enough tokens for {count} sequences of {length}, got {len(stream)}, enough for {room}; "
            "give more"
        )
    places = np.random.default_rng(seed).permutation(room)[:count] * length
    return torch.from_numpy(np.stack([stream[at : at + length] for at in places]).astype(np.int64))


def self_generate(
    target: FrozenTarget, prompts: Tensor, length: int, *, temperatures: Sequence[float]
) -> list[Callable[[], Tensor]]:
    """Return makers of the target's continuations of prompts [n, S] to [<= `TEXTS_PER_FILE`, length] each; the
    temperatures take turns.
    """

    def batch(index: int, part: Tensor) -> Tensor:
        torch.manual_seed(index)
        return target.continued(part, length - part.shape[1], temperature=temperatures[index % len(temperatures)])

    return [partial(batch, index, part) for index, part in enumerate(prompts.split(TEXTS_PER_FILE))]
