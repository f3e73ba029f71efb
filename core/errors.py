"""All errors that a user can cause. Internal invariants are asserted instead.

Each message states what is wrong and how to correct it.
"""


class PacelineError(Exception):
    """Base of all errors raised on purpose by this package."""


class CheckpointError(PacelineError):
    """A model folder cannot be used."""


class MissingWeightsError(CheckpointError):
    """A weight file or a tensor is absent, truncated or unreadable."""


class WeightShapeError(CheckpointError):
    """A tensor has another shape than the configuration says."""


class WeightValueError(CheckpointError):
    """A tensor holds NaN or infinity."""


class UnknownArchitectureError(CheckpointError):
    """The folder's ``model_type`` or one of its options is not supported."""


class RequestError(PacelineError, ValueError):
    """A request cannot be served with its values."""


class PromptError(RequestError):
    """The prompt is empty, of a wrong type, or has ids out of range; or it is too long."""


class ContextError(PromptError):
    """The prompt leaves no position for a token."""


class SamplingError(RequestError):
    """A sampling or stopping value is out of range. ``param``: its name in `Sampling`, if it is one of those."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PairingError(PacelineError):
    """Draft and target cannot work together."""


class ConfigurationError(PacelineError, ValueError):
    """Options of a decoder or a generator contradict each other."""


class BackendError(PacelineError):
    """A compiler or a device is missing, or compiling failed."""


class ArtefactError(BackendError):
    """Saved graphs do not fit this decoder or this machine."""


class RankError(BackendError):
    """A process of a tensor-parallel model failed or is gone."""


class QueueFullError(PacelineError):
    """The queue is full. ``retry_after``: seconds until there may be capacity, if known."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type["QueueFullError"], tuple[str, float]]:
        """Keep the number when the error crosses a process."""
        return type(self), (str(self), self.retry_after)


class DeadlineError(PacelineError, TimeoutError):
    """A request was not finished in the time its caller gave it."""


class EventLoopError(PacelineError, RuntimeError):
    """An object that belongs to one event loop is used from another."""


class DecoderBusyError(PacelineError):
    """Two generations want one KV cache at the same time."""


class FetchError(PacelineError):
    """A known model or one of the hub cannot be fetched: no such model, no pip, or another file than expected."""


class DownloadError(FetchError):
    """The package index or the Hugging Face hub could not be reached, or the index does not have the package."""


class TraceError(PacelineError):
    """A recorded trace cannot be used: damaged, of another version, or of another model."""


class StorageError(PacelineError):
    """A file cannot be written: the disk is full or read-only, or permission is missing."""


class PlacementError(PacelineError):
    """Models cannot be put on cores, or cannot be kept running on them."""


class PlanError(PlacementError, ConfigurationError):
    """No plan exists for these models on this instance."""


class RoomError(PlanError):
    """The models are valid but do not fit: too few cores, or too little memory on a core."""


class CoresBusyError(PlacementError):
    """Another process uses cores that this one was given."""


class WorkerError(PlacementError):
    """A worker did not start as planned."""


class ChannelError(PlacementError):
    """The socket between a target and its drafter failed: closed, late, or not understood."""


class TargetLostError(PlacementError):
    """A target died more often than allowed. ``tokens`` holds the emitted tokens of every request of the call."""

    def __init__(self, message: str, tokens: tuple[tuple[int, ...], ...] = ()) -> None:
        super().__init__(message)
        self.tokens = tokens

    def __reduce__(self) -> tuple[type["TargetLostError"], tuple[str, tuple[tuple[int, ...], ...]]]:
        """Keep the tokens when the error crosses a process."""
        return type(self), (str(self), self.tokens)
