"""What is asked of a node of the cluster: whether it lives, where it is reached, and to kill a process there."""

from __future__ import annotations

import socket
from contextlib import suppress

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.placement.host import environment, processes
from paceline.placement.host.processes import Process
from paceline.placement.remote.channel import Address

_PATIENCE = 30.0  # seconds for a small task


def living() -> set[str]:
    """The nodes that the cluster counts among the living. One that is gone never comes back under its name."""
    return {str(item["NodeID"]) for item in ray.nodes() if item["Alive"]}


def lives(node: str) -> bool:
    """Whether the node is one of them."""
    return node in living()


def tcp_address(node: str) -> Address:
    """The node's address in the cluster's network, with a port that nobody uses there now."""
    host = next(str(item["NodeManagerAddress"]) for item in ray.nodes() if item["NodeID"] == node)
    return Address(host=host, port=int(ray.get(_on(node, _free_port).remote(host), timeout=_PATIENCE)))


def kill(node: str, process: Process) -> bool:
    """End a process on a node, if it still runs; whether that is known."""
    with suppress(ray.exceptions.RayError):
        return bool(ray.get(_on(node, processes.kill).remote(process), timeout=_PATIENCE))
    return False


def _on(node: str, function: object) -> ray.remote_function.RemoteFunction:
    """A task that runs there, and has none of the cores of a worker that asks for it."""
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    clean = {"env_vars": environment.without_cores()}
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=here, max_retries=0, runtime_env=clean)


def _free_port(host: str) -> int:
    with socket.socket() as link:
        link.bind((host, 0))
        return int(link.getsockname()[1])
