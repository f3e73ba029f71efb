"""The cluster: joining it, listing its living nodes, finding a node's address, killing a process on a node, and storage
that outlives processes.
"""

from __future__ import annotations

import socket
from contextlib import suppress

import ray
from ray.experimental import internal_kv  # without public names; Serve and others use it all the same (Ray 2.60)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.core.errors import PlanError
from paceline.placement.host import environment, processes
from paceline.placement.host.processes import Process
from paceline.placement.remote.channel import Address

NAMESPACE = "paceline"
"""Ray namespace of all actors of this package."""
RESOURCE = "neuron_cores"
"""Ray's name of the resource that it counts on a node."""
RAY_ERRORS = (OSError, RuntimeError, ValueError, ray.exceptions.RayError)
"""Errors that Ray raises if a cluster cannot be started or joined."""
_NEW_CLUSTER = "local"  # as an address: a separate cluster, even if another one runs on this machine
_TASK_S = 30.0  # for a small task


def connect(address: str | None, *, cores: int, num_cpus: int | None = None) -> None:
    """Connect this process to a Ray cluster: that at the address, or a new one on this machine (None) with ``cores``
    cores.

    ``num_cpus``: CPUs of a new one, as Ray counts them.

    Raises:
        PlanError: there is no such cluster, or Ray does not start on this machine.
    """
    own: dict[str, object] = {}
    if address is None:
        environment.check_unassigned()
        own = {"resources": {RESOURCE: cores}, "num_cpus": num_cpus, "include_dashboard": False}
    try:
        ray.init(address=address or _NEW_CLUSTER, namespace=NAMESPACE, log_to_driver=False, **own)
    except RAY_ERRORS as error:
        failure = f"no Ray cluster can be joined at {address}" if address else "Ray did not start on this machine"
        raise PlanError(f"{failure}: {summary(error)}; see Ray's log") from error


def summary(error: Exception) -> str:
    """Return the first and the last line; Ray puts the tracebacks of other processes between them."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


def living() -> set[str]:
    """Return the nodes that Ray counts as alive. A lost node never returns under its id."""
    return {str(item["NodeID"]) for item in ray.nodes() if item["Alive"]}


def host_names() -> dict[str, str]:
    return {str(item["NodeID"]): str(item["NodeManagerHostname"]) for item in ray.nodes()}


def tcp_address(node: str) -> Address:
    """Return the node's address in the cluster's network, with a port that is free now."""
    host = next(str(item["NodeManagerAddress"]) for item in ray.nodes() if item["NodeID"] == node)
    return Address(host=host, port=int(ray.get(_on(node, _free_port).remote(host), timeout=_TASK_S)))


def kill(node: str, process: Process) -> bool:
    """End a process on a node if it still runs; return whether that is certain."""
    with suppress(ray.exceptions.RayError):
        return bool(ray.get(_on(node, processes.kill).remote(process), timeout=_TASK_S))
    return False


def _on(node: str, function: object) -> ray.remote_function.RemoteFunction:
    """Return a task that runs on that node, without the cores of the worker that submits it."""
    affinity = NodeAffinitySchedulingStrategy(node, soft=False)
    variables = {"env_vars": environment.without_cores()}
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=affinity, max_retries=0, runtime_env=variables)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


_SPACE = b"paceline"  # of the keys
STORE_ERRORS = (AttributeError, OSError, RuntimeError, ValueError, ray.exceptions.RayError)
"""Errors of a store that does not respond, or does not exist."""


def keep(key: bytes, data: bytes) -> None:
    """Store data in Ray's GCS, replacing earlier data. Raises one of `STORE_ERRORS`."""
    internal_kv._internal_kv_put(key, data, namespace=_SPACE)


def kept(key: bytes) -> bytes | None:
    """Return the stored data. Raises one of `STORE_ERRORS`."""
    data: bytes | None = internal_kv._internal_kv_get(key, namespace=_SPACE)
    return data


def forget(key: bytes) -> None:
    """Delete the stored data. Raises one of `STORE_ERRORS`."""
    internal_kv._internal_kv_del(key, namespace=_SPACE)
