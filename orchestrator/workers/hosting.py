"""What workers of `paceline.placement` run: a target with its loop, or a draft model, made from plain settings.

Not here: processes, sockets and cores. A maker is called once in a worker, when that worker may touch its cores.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.auto import AutoDecoder, SamplingDecoder
from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import PAD, Commit, RoundLimits
from paceline.decoder.decoder import CompiledDecoder
from paceline.draft.model import ModelDrafter
from paceline.draft.vocab_map import VocabMap
from paceline.engine import warmup
from paceline.engine.ask import Ask
from paceline.generator import SpeculativeGenerator
from paceline.placement.cluster.roles import TokenDelta
from paceline.placement.lookahead.drafter import LookaheadDrafter
from paceline.placement.remote.messages import Handshake
from paceline.text.tokenizer import Tokenizer, load_tokenizer
from paceline.workers.replay import Replay
from paceline.workers.second_choices import SecondChoices
from paceline.workers.shared_engine import SharedEngine

ASKS = frozenset(
    {
        "sequence_length", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "do_sample", "seed",
        "eos_token_id", "stop_strings", "no_repeat_ngram_size", "repetition_penalty",
    }
)  # fmt: skip
"""Keywords of `sample` that can be asked of a target in another process."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of a worker: how its model is loaded, drafted tokens a round, and whether it works ahead."""

    folder: Path
    amp: str
    batch_size: int
    n_positions: int
    backend: str
    k: int
    ahead: bool
    tp_degree: int = 1
    group_query_attention: str | None = None

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> WorkerConfig:
        """Read them; quantisation is planned with, but not run.

        Raises:
            ConfigurationError: a setting that nothing here does.
        """
        if settings["quantisation"] != "none":
            raise ConfigurationError(
                f"quantisation={settings['quantisation']!r} can be planned but not run yet; use none to launch"
            )
        slots, positions, k = (int(str(settings[name])) for name in ("batch_size", "n_positions", "k"))
        folder, ahead = Path(str(settings["folder"])), bool(settings["ahead"])
        degree, gqa = int(str(settings.get("tp_degree", 1))), settings.get("group_query_attention")
        return cls(
            folder, str(settings["amp"]), slots, positions, str(settings["backend"]), k, ahead, degree,
            None if gqa is None else str(gqa),
        )  # fmt: skip

    def decoder(self) -> SamplingDecoder:
        return AutoDecoder.from_pretrained(
            self.folder,
            batch_size=self.batch_size,
            n_positions=self.n_positions,
            amp=self.amp,
            backend=self.backend,
            tp_degree=self.tp_degree,
            group_query_attention=self.group_query_attention,
        )

    def another(self, first: SamplingDecoder) -> CompiledDecoder:
        """A decoder with a cache of its own: over the same weights, or read again where ranks hold one cache each."""
        return first.sibling() if self.tp_degree == 1 else self.decoder()


class TargetHost:
    """Generates for all callers together; the loop runs here, beside the target."""

    def __init__(self, settings: Mapping[str, object], drafter: Drafter | None) -> None:
        given = WorkerConfig.of(settings)
        self._folder, self._target = given.folder, given.decoder()
        replay = None if drafter is None else Replay(drafter)
        self._generator = SpeculativeGenerator(replay, self._target)
        self._desk = SharedEngine(self._generator, replay)
        self._tokenizer: Tokenizer | None = None

    def stream(
        self,
        ticket: str,
        prompts: Sequence[Sequence[int]],
        emitted: Sequence[Sequence[int]],
        *,
        ask: Mapping[str, object],
    ) -> Generator[TokenDelta, None, None]:
        """See `paceline.placement.cluster.roles.Target`."""
        unknown = sorted(set(ask) - ASKS)
        if unknown:
            raise ConfigurationError(
                f"{unknown[0]!r} cannot be asked of a target in another process; there are {', '.join(sorted(ASKS))}"
            )
        tokenizer = self._text() if ask.get("stop_strings") else None
        asked = Ask(input_ids=[list(p) for p in prompts], tokenizer=tokenizer, **ask)  # type: ignore[arg-type]
        known = [list(tokens) for tokens in emitted]
        for event in self._desk.stream(ticket, asked.requests(self._target), emitted, processor=asked.processor()):
            before = known[event.index][: len(event.tokens)]
            assert before == list(event.tokens[: len(before)]), "the same seed gave other tokens after a fault"
            del known[event.index][: len(before)]
            fresh = event.tokens[len(before) :]
            if fresh or event.finish_reason is not None:
                yield TokenDelta(event.index, fresh, max(0, event.accepted - len(before)), event.finish_reason)

    def leave(self, ticket: str) -> None:
        """See `paceline.placement.cluster.roles.Target`."""
        self._desk.abort(ticket)

    def progress(self) -> int:
        """See `paceline.placement.cluster.roles.Target`."""
        return self._desk.events

    def statistics(self) -> Mapping[str, object]:
        """Since the target was last idle; complete when it is idle again."""
        return self._generator.statistics.to_dict()

    def compile(self) -> None:
        """Make the graphs before the first request waits for them.

        A draft in another process may have nothing to propose yet, so the graph of a full window is asked for by width.
        """
        if nodes := self._generator.drafter.draft_shape.num_draft_tokens:
            self._target.compile(verify_width=nodes + 1)
        self._generator.compile()

    def _text(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._folder)
        return self._tokenizer


def target(settings: Mapping[str, object], drafter: Drafter | None) -> TargetHost:
    """The maker of a target's worker."""
    host = TargetHost(settings, drafter)
    host.compile()
    return host


class DraftPool:
    """Drafters of one model: a decoder for each target of the plan, over the same weights if they are whole.

    They are there, with their graphs, before the first target calls; who hangs up leaves its decoder to the next. A
    `paceline.placement.remote.server.DrafterPool`.
    """

    def __init__(self, given: WorkerConfig, clients: int, vocab_sizes: Sequence[int]) -> None:
        self._given, self._clients = given, clients
        first = given.decoder()
        self._free: list[CompiledDecoder] = [first, *(given.another(first) for _ in range(clients - 1))]
        self._lent: dict[int, CompiledDecoder] = {}  # by the number of the drafter over it
        self._compiled = frozenset(vocab_sizes)
        for decoder in self._free:
            for size in vocab_sizes:
                ready(self._over(decoder, size), given.k + 1, reviewed=given.ahead)

    def acquire(self, hello: Handshake) -> Drafter:
        """See `paceline.placement.remote.server.DrafterPool`.

        Raises:
            ConfigurationError: the target has another batch, or all decoders are in use.
        """
        given = self._given
        if hello.slots != given.batch_size:
            raise ConfigurationError(
                f"the target {hello.target} has {hello.slots} slots and the draft {given.batch_size}; give both "
                "the same batch_size"
            )
        if not self._free:
            raise ConfigurationError(
                f"this draft has room for {self._clients} targets at a time, and they are here; name more in `draft_of`"
                ", or give the setting `clients`"
            )
        decoder = self._free[-1]
        model = self._over(decoder, hello.vocab_size)
        if hello.vocab_size not in self._compiled:
            ready(model, given.k + 1, reviewed=given.ahead)
        made: Drafter = LookaheadDrafter(model, SecondChoices(decoder, model.vocabulary)) if given.ahead else model
        self._lent[id(made)] = self._free.pop()
        return made

    def release(self, drafter: Drafter) -> None:
        """See `paceline.placement.remote.server.DrafterPool`."""
        self._free.append(self._lent.pop(id(drafter)))

    def _over(self, decoder: CompiledDecoder, vocab_size: int) -> ModelDrafter:
        vocabulary = VocabMap(vocab_size, decoder.config.vocab_size)
        return ModelDrafter(decoder, self._given.k + self._given.ahead, vocabulary=vocabulary)


def draft(settings: Mapping[str, object]) -> DraftPool:
    """The maker of a draft's worker.

    Settings of its own: ``clients``, targets at a time (1), and ``vocab_sizes`` of the targets, whose graphs are made
    before the first one calls; those of others when they call.
    """
    sizes = settings.get("vocab_sizes", ())
    if not isinstance(sizes, list | tuple):
        raise ConfigurationError(f"the setting vocab_sizes is a list of numbers, not {sizes!r}")
    return DraftPool(WorkerConfig.of(settings), int(str(settings.get("clients", 1))), [int(size) for size in sizes])


def ready(drafter: ModelDrafter, width: int, *, reviewed: bool) -> None:
    """Make the graphs of a drafter for texts of any length, by running each once, for commits of that width.

    ``reviewed``: it works ahead.
    """
    decoder = drafter.decoder
    for start, size in warmup.gaps(decoder):
        drafter.read(0, [0] * size, start=start)
    slots = decoder.batch_size
    tokens = torch.full((slots, width), PAD, dtype=torch.int32)
    tokens[:, 0] = 0
    one, zero = torch.ones(slots, dtype=torch.int32), torch.zeros(slots, dtype=torch.int32)
    commit, sampling = Commit(tokens, one, zero), sampling_tensors([Sampling()] * slots)
    for rows in warmup.lengths(decoder):
        drafter.propose(commit, sampling, RoundLimits(zero + drafter.draft_shape.num_draft_tokens, rows))
        if reviewed:
            SecondChoices(decoder, drafter.vocabulary).reread(commit, rows)
