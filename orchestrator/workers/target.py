"""What the worker of a target runs: its model, who drafts for it, and the engine that all callers share.

Not here: the process, its socket and its cores (`paceline.placement`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace

from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter
from paceline.engine.request import Request, SamplingParams, TargetLimits
from paceline.generator import SpeculativeGenerator
from paceline.outputs import RequestOutput
from paceline.placement.cluster.roles import GenerateRequest
from paceline.placement.host.processes import run_apart
from paceline.text.tokenizer import Tokenizer, load_tokenizer
from paceline.workers.config import WorkerConfig
from paceline.workers.replay import Replay
from paceline.workers.shared_engine import EngineLimits, SharedEngine


class TargetHost:
    """Generates for all callers together. A `paceline.placement.cluster.roles.Target`.

    ``remote``: the drafter in another process, if there is one; else those of ``config.speculative`` draft here.
    ``max_waiting``: requests that may wait for a slot; None = any number.
    """

    def __init__(self, config: WorkerConfig, remote: Drafter | None, *, max_waiting: int | None = None) -> None:
        self._folder, self._target = config.folder, config.load()
        # A drafter in this process is lost with the target, so there is nothing to keep in step with: after a fault
        # the whole text is decoded again.
        replay = None if remote is None else Replay(remote)
        options = dict(config.speculative)
        if replay is not None:
            options |= {"draft": replay, "k": None}
        self._generator = SpeculativeGenerator(options.pop("draft"), self._target, **options)
        self.engine = SharedEngine(self._generator, replay, limits=EngineLimits(max_waiting))
        self._tokenizer: Tokenizer | None = None

    def stream(self, request: GenerateRequest) -> Generator[RequestOutput, None, None]:
        """See `paceline.placement.cluster.roles.Target`.

        Raises:
            PromptError, SamplingError, ConfigurationError: the request cannot be served.
        """
        params = request.params
        if not isinstance(params, SamplingParams):
            raise ConfigurationError(f"params is a {type(params).__name__}; send SamplingParams")
        if params.stop_strings or params.structured_outputs is not None or isinstance(params.prediction, str):
            params = replace(params, tokenizer=self._load_tokenizer())
        requests = Request.batch(request.prompts, params, self._generator.limits)
        known = {row: list(request.emitted[row]) for row in request.rows}
        outputs = self.engine.stream(request.ticket, [requests[row] for row in request.rows], list(known.values()))
        for output in outputs:
            # What was emitted is taken as it is: on xla and neuron a near-tie may fall otherwise beside other texts.
            before = min(len(known[output.index]), len(output.tokens))
            del known[output.index][:before]
            if before < len(output.tokens) or output.finish_reason is not None:
                yield _without_first(output, before)

    @property
    def limits(self) -> TargetLimits:
        """What a request may ask."""
        return self._generator.limits

    @property
    def num_spec_tokens(self) -> int:
        """Most drafted tokens of a round."""
        return self._generator.drafter.draft_shape.num_draft_tokens

    def abort(self, ticket: str) -> None:
        self.engine.abort(ticket)

    def progress(self) -> int:
        return self.engine.heartbeat

    def statistics(self) -> Mapping[str, object]:
        return self._generator.statistics.to_dict()

    def compile(self) -> None:
        """Make the graphs before the first request, so that none has to wait for one."""
        self._generator.compile()

    def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._folder)
        return self._tokenizer


def _without_first(output: RequestOutput, count: int) -> RequestOutput:
    """The output without its first ``count`` tokens, which were emitted before a fault."""
    if not count:
        return output
    logprobs = None if output.logprobs is None else output.logprobs[count:]
    of_model = None if output.token_logprobs is None else output.token_logprobs[count:]
    accepted = max(0, output.accepted - count)
    return replace(output, tokens=output.tokens[count:], accepted=accepted, logprobs=logprobs, token_logprobs=of_model)


def make_target(
    settings: Mapping[str, object], drafter: Drafter | None, *, max_waiting: int | None = None
) -> TargetHost:
    """The default maker of a target's worker. Its engine has a thread of its own, so that it is loaded in another."""
    config = WorkerConfig.from_settings(settings)

    def load() -> TargetHost:
        host = TargetHost(config, drafter, max_waiting=max_waiting)
        host.compile()
        return host

    return run_apart(load)
