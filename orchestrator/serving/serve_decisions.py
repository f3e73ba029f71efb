"""What an operator decided while a service ran, kept by the cluster, so that the next HTTP process knows it.

It lies in the key-value store of Ray's GCS, as the state of Ray Serve itself does: it outlives every process but the
GCS, and that one too where it has fault tolerance. Not here: what follows from it (`paceline.serving.lifecycle`).
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

from ray.exceptions import RayError
from ray.experimental import internal_kv  # its functions have no public names; Serve and others use them all the same

from paceline.core.errors import WorkerError
from paceline.serving.decisions import Decisions

_SPACE = b"paceline"  # of keys, beside that of the core allocator
_ERRORS = (
    AttributeError,
    OSError,
    RuntimeError,
    ValueError,
    RayError,
)  # of a store that does not answer, or is not there


async def write(application: str, decisions: Decisions) -> None:
    """Replace what is known of an application's models.

    Raises:
        WorkerError: the store does not answer.
    """
    data = json.dumps(asdict(decisions)).encode()
    try:
        await asyncio.to_thread(internal_kv._internal_kv_put, _key(application), data, namespace=_SPACE)
    except _ERRORS as error:
        raise WorkerError(f"Ray's GCS does not keep what is pinned ({type(error).__name__})") from error


async def read(application: str) -> Decisions:
    """What was written last; nothing where nothing was.

    Raises:
        WorkerError: the store does not answer, or something else wrote there.
    """
    try:
        data = await asyncio.to_thread(internal_kv._internal_kv_get, _key(application), namespace=_SPACE)
        return Decisions() if data is None else Decisions(**json.loads(data))
    except (*_ERRORS, TypeError) as error:
        raise WorkerError(f"Ray's GCS does not tell what is pinned ({type(error).__name__})") from error


def forget(application: str) -> None:
    """The application has ended; the next one of its name begins as its file says.

    Raises:
        RayError, RuntimeError: the store does not answer.
    """
    internal_kv._internal_kv_del(_key(application), namespace=_SPACE)


def _key(application: str) -> bytes:
    return f"operator-decisions-{application}".encode()
