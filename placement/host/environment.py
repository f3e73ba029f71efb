"""Environment variables of processes on NeuronCores: computed, set and checked in this module only.

NEURON_RT_VISIBLE_CORES            the range, "0-7"
NEURON_RT_ROOT_COMM_ID             one address for each process that uses several cores
NEURON_RT_EXEC_TIMEOUT             the documents name three defaults, so it is always set
NEURON_RT_STOCHASTIC_ROUNDING_EN   off: the same seed gives the same tokens
NEURON_PROCESS_TAG                 so that neuron-monitor can tell models apart
NEURON_LOGICAL_NC_CONFIG, NEURON_RT_VIRTUAL_CORE_SIZE   physical cores in a logical one (Trn2); both names in use
OMP_NUM_THREADS                    this process's share of the host's threads
OMP_WAIT_POLICY                    PASSIVE for a process that computes alongside another one
RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES   Ray counts cores but must not choose them
PACELINE_CORES                     the same range under Paceline's name, for a host without Neuron
RAY_SERVE_*, RAY_*                 set for a new cluster: `prepare_new_cluster` says why
PACELINE_LOCKS                     read: folder of the locks of simulated cores; default below the temporary folder

Also private folders below the temporary folder, which all users of a machine share. Another user may have put a folder
or a link at the path of one of ours. That user could then move what is written there, or redirect a write to another
file of ours.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from paceline.core.errors import PlanError, WorkerError
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.instances import Instance

_NEW_CLUSTER = {
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_worker_niceness": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_SLOW_STARTUP_WARNING_S": "8",
    "RAY_SERVE_PROXY_GRACEFUL_SHUTDOWN_TIMEOUT_S": "1",
    "RAY_kill_worker_timeout_milliseconds": "2000",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "3",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "3",
}
FIRST_PORT = 62182
EXECUTION_TIMEOUT_S = 600.0
"""Seconds after which one execution counts as hung."""
CORES = "NEURON_RT_VISIBLE_CORES"
NOSET = "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES"
_TAG_LENGTH = 32  # maximum length of NEURON_PROCESS_TAG, from neuron-monitor's guide


def planned(instance: Instance, cores: CoreRange, *, label: str, threads: int) -> tuple[tuple[str, str], ...]:
    """Return the variables of a process on these cores. Its port follows from them, so running processes have different
    ones.
    """
    variables = {"PACELINE_CORES": str(cores), "OMP_NUM_THREADS": str(threads), NOSET: "1"}
    if instance.sdk:
        variables |= {
            CORES: str(cores),
            "NEURON_RT_EXEC_TIMEOUT": str(int(EXECUTION_TIMEOUT_S)),
            "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
            "NEURON_PROCESS_TAG": f"paceline:{label}"[:_TAG_LENGTH],
        }
        if len(cores) > 1:
            variables["NEURON_RT_ROOT_COMM_ID"] = f"127.0.0.1:{FIRST_PORT + cores.first}"
        if instance.logical:
            physical = str(instance.logical)
            variables |= {"NEURON_LOGICAL_NC_CONFIG": physical, "NEURON_RT_VIRTUAL_CORE_SIZE": physical}
    return tuple(sorted(variables.items()))


def check(env: tuple[tuple[str, str], ...]) -> None:
    """Raise WorkerError unless this process has the variables of its plan."""
    wrong = [
        f"{name} is {os.environ.get(name)!r}, not {value!r}" for name, value in env if os.environ.get(name) != value
    ]
    if wrong:
        raise WorkerError(
            f"this process was not started as planned: {'; '.join(wrong)}; unset these variables on Ray's nodes, so "
            "that the plan can set them"
        )


def apply(env: tuple[tuple[str, str], ...]) -> None:
    """Set the variables of this process's plan, before the Neuron runtime is initialised; it has no cores yet."""
    for name in (CORES, "PACELINE_CORES"):
        if os.environ.get(name):
            raise WorkerError(f"this process already has cores ({name}={os.environ[name]!r}); unset it on Ray's nodes")
    os.environ.update(env)


def prepare_new_cluster() -> None:
    """Set defaults for a Ray cluster that this process starts: unresponsive processes are replaced within some 20
    seconds, models run at normal priority, and ready outputs are passed on together.

    A suspended replica cannot end itself, and by default Ray Serve would wait for it as for a graceful shutdown. A
    proxy counts as lost after three failed checks in a row. Each check has a pause and a timeout, 10 seconds by
    default; 3 are enough for a process that only forwards text. Then the controller asks the proxy to end and does
    nothing else until it has, for up to 5 seconds by default.

    Ray kills a process that does not end within 2 seconds (5 by default); until then a suspended proxy's socket accepts
    connections, next to that of its successor, and does not answer them. A restarted controller polls each existing
    replica, and ends one that has not responded after 8 seconds (30 by default; for replicas that it starts it only
    logs a warning then). Ray starts workers at niceness 15: next to any other computation they get a thirtieth of a
    CPU, and take minutes to restart.

    By default Ray Serve runs a deployment's code in a separate thread and event loop, so that blocking code does not
    delay Serve's loop, and passes every item of a stream between the loops. Ours does not block: models load before a
    replica gets requests, the engine and tokenizers have their own threads, and health checks run in our code's loop in
    either case. In one loop an item is taken once Ray has finished the previous one, so several rounds of a stream
    become one item if Ray is slow (`paceline.workers.shared_engine`). Handles keep their loop
    (RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP): it does not carry items, and without it a request that is aborted while it
    is assigned may not be cancelled.
    """
    for name, value in _NEW_CLUSTER.items():
        os.environ.setdefault(name, value)


def check_unassigned() -> None:
    """Check that this process, which is to start a Ray cluster, was not given cores itself.

    Raises:
        PlanError: it was. Ray would take them for those of the machine, and cannot read a range such as 0-7.
    """
    if cores := os.environ.get(CORES):
        raise PlanError(
            f"{CORES}: expected it unset, since a plan assigns every process its own cores, got {cores}; unset it "
            f"for this command (env -u {CORES} paceline ...), or, to keep cores for other programs, start Ray "
            "yourself with as many neuron_cores as it may use, and join it by its address"
        )


def assigned_cores() -> str:
    """Return the cores that this process was started with; "" if none."""
    return os.environ.get("PACELINE_CORES", "")


def without_cores(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return variables for a child of a worker, which must not inherit the worker's cores as Ray and fork would have
    it.
    """
    return dict(env or {}) | {CORES: "", "PACELINE_CORES": ""}


def for_child(env: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return the full environment of a process that is started directly, without Ray."""
    return without_cores(os.environ) | dict(env)


def for_actor(env: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return the variables that an actor adds to its job's: cores that a job gives to all its actors are not this
    actor's.
    """
    return without_cores() | dict(env)


def lock_folder() -> Path:
    return Path(os.environ.get("PACELINE_LOCKS") or scratch() / "cores")


def share_cpus(first: int, last: int) -> None:
    """Restrict this process to its share of the host's CPUs, if the host has that many."""
    allowed = os.sched_getaffinity(0)
    share = set(range(first, last + 1))
    if share <= allowed:
        os.sched_setaffinity(0, share)


def scratch() -> Path:
    """Return the folder of this user's locks and sockets."""
    return Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"


def private(folder: Path) -> None:
    """Make a folder, and missing levels above it, that this user only can change; WorkerError if another one can."""
    path = folder.absolute()
    for level in (*reversed(path.parents), path):  # no level is created in an unchecked one
        try:
            if not level.exists():
                level.mkdir(mode=0o700, exist_ok=True)
            status = level.lstat()
        except OSError as error:
            raise WorkerError(f"{folder}: the folder cannot be used ({error}); set TMPDIR to another folder") from error
        if not _safe(status):
            raise WorkerError(
                f"{level}: expected a folder that only you can write to, got one of another user or writable by "
                f"others, so {folder} is unsafe; remove it, or set TMPDIR (for core locks: PACELINE_LOCKS) to "
                "another folder"
            )


def _safe(status: os.stat_result) -> bool:
    """Whether only this user and root can change the entries; everyone may add to a sticky folder, such as /tmp."""
    if status.st_uid not in (0, os.getuid()):
        return False
    own_group = status.st_gid == os.getgid()
    closed = not status.st_mode & (stat.S_IWOTH | (0 if own_group else stat.S_IWGRP))
    return closed or stat.S_ISLNK(status.st_mode) or bool(status.st_mode & stat.S_ISVTX)
