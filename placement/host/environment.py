"""The variables of a process that runs on NeuronCores: computed, set and checked here and nowhere else.

NEURON_RT_VISIBLE_CORES            the range, "0-7"
NEURON_RT_ROOT_COMM_ID             one address for each process that uses several cores
NEURON_RT_EXEC_TIMEOUT             the documents name three defaults, so it is always set
NEURON_RT_STOCHASTIC_ROUNDING_EN   off: the same seed gives the same tokens
NEURON_PROCESS_TAG                 so that neuron-monitor can tell models apart
NEURON_LOGICAL_NC_CONFIG, NEURON_RT_VIRTUAL_CORE_SIZE   physical cores in a logical one (Trn2); both names in use
OMP_NUM_THREADS                    this process's share of the host's threads
OMP_WAIT_POLICY                    PASSIVE for a process that computes beside another one
RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES   Ray counts cores but must not choose them
PACELINE_CORES                     the same range under our own name, for a host without Neuron
RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S and _TIMEOUT_S   written: how soon Ray Serve replaces a proxy that does not answer
RAY_SERVE_PROXY_GRACEFUL_SHUTDOWN_TIMEOUT_S   written: how long Ray Serve's controller waits for a proxy that it ends
RAY_kill_worker_timeout_milliseconds   written: how soon Ray kills a process that it asked to end
RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS   written: Ray Serve ends a replica that does not answer without waiting for it
RAY_SERVE_SLOW_STARTUP_WARNING_S   written: how long a new controller of Ray Serve waits for a replica that it found
RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD   written: whether Ray Serve gives our code an event loop beside its own
RAY_worker_niceness                written: the priority of Ray's worker processes, on the scale of nice
PACELINE_LOCKS                     read: folder of the locks of simulated cores; default below the temporary folder

Also private folders below the temporary folder, which all users of a machine share: another user may have put a folder
or a link where one of ours is to be, and could then move what is written there, or make it change a file of ours
somewhere else.
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

FORCE_STOP = "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"
PROXY_CHECKS = ("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S")
_PROXY_CHECK_S = "3"
PROXY_END = "RAY_SERVE_PROXY_GRACEFUL_SHUTDOWN_TIMEOUT_S"
_PROXY_END_S = "1"
KILL = "RAY_kill_worker_timeout_milliseconds"
_KILL_MS = "2000"
SLOW_START = "RAY_SERVE_SLOW_STARTUP_WARNING_S"
_SLOW_START_S = "8"
NICENESS = "RAY_worker_niceness"
USER_THREAD = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"
FIRST_PORT = 62182
CORES = "NEURON_RT_VISIBLE_CORES"
NOSET = "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES"
_TAG_LENGTH = 32  # of NEURON_PROCESS_TAG, as neuron-monitor's guide has it


def planned(
    instance: Instance, cores: CoreRange, *, label: str, threads: int, timeout: float
) -> tuple[tuple[str, str], ...]:
    """The variables of a process on these cores. Its port follows from them, so that no two that run have the same."""
    variables = {"PACELINE_CORES": str(cores), "OMP_NUM_THREADS": str(threads), NOSET: "1"}
    if instance.sdk:
        variables |= {
            CORES: str(cores),
            "NEURON_RT_EXEC_TIMEOUT": str(int(timeout)),
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
    """Check that this process has the variables of its plan.

    Raises:
        WorkerError: it has not, and must not touch a core.
    """
    wrong = [
        f"{name} is {os.environ.get(name)!r}, not {value!r}" for name, value in env if os.environ.get(name) != value
    ]
    if wrong:
        raise WorkerError(
            f"this process was not started as planned: {'; '.join(wrong)}; unset these variables where Ray's nodes "
            "are started, and let the plan set them"
        )


def apply(env: tuple[tuple[str, str], ...]) -> None:
    """Give this process the variables of its plan, before anything in it initialises the runtime.

    Raises:
        WorkerError: it has other cores already.
    """
    for name in (CORES, "PACELINE_CORES"):
        if os.environ.get(name):
            raise WorkerError(
                f"this process has cores already ({name}={os.environ[name]!r}); unset it where Ray's nodes start"
            )
    os.environ.update(env)


def prepare_new_cluster() -> None:
    """Have a cluster that this process starts replace what does not answer within some 20 seconds, run models at
    the usual priority, and pass on what is ready in one piece.

    A stopped replica cannot end itself, and Ray Serve would give it the time that answers under way have when a service
    is taken down. A proxy is lost after three checks in a row, each of a pause and a time to answer of 10 seconds by
    default; 3 seconds are enough for a process that has nothing else to do than to pass text on. Then the controller
    asks it to end, and does nothing else until it has, for 5 seconds by default. Ray kills what does not end when it is
    to in 2 seconds, by default 5; until then a stopped proxy's socket takes connections that nobody answers, beside
    that of its successor. A controller that was started again asks each replica that it finds, and ends one that has
    not answered in 8 seconds (30 by default; of replicas that start it only writes a warning after that time). Ray
    starts workers at niceness 15: beside anything else that computes they get a thirtieth of a CPU, and take minutes to
    be there again.

    Ray Serve runs a deployment's code in a thread and an event loop of its own, so that code that blocks does not keep
    Serve's loop from its work, and hands every item of a stream from one loop to the other. Ours does not block: models
    load before a replica is asked anything, the engine and tokenizers have threads of their own, and whether a replica
    is healthy is asked in the loop of our code in any case. In one loop an item is taken when Ray is done with the one
    before, so that several rounds of a stream come as one item where Ray is behind
    (`paceline.workers.shared_engine`). Handles stay as they are (RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP): their
    loop has no part in items, and without it a request that is given up while it is assigned may not be cancelled.
    """
    os.environ.setdefault(FORCE_STOP, "1")
    os.environ.setdefault(NICENESS, "0")
    os.environ.setdefault(USER_THREAD, "0")
    os.environ.setdefault(SLOW_START, _SLOW_START_S)
    os.environ.setdefault(PROXY_END, _PROXY_END_S)
    os.environ.setdefault(KILL, _KILL_MS)
    for name in PROXY_CHECKS:
        os.environ.setdefault(name, _PROXY_CHECK_S)


def check_unassigned() -> None:
    """Check that this process, which is to start a Ray cluster, was not given cores itself.

    Raises:
        PlanError: it was. Ray would take them for those of the machine, and reads no range such as 0-7.
    """
    if cores := os.environ.get(CORES):
        raise PlanError(
            f"{CORES}={cores} is set, and a plan gives every process cores of its own; unset it for this command "
            f"(env -u {CORES} paceline ...). To keep cores for other programs, start Ray yourself with as many "
            "neuron_cores as it may use, and join it by its address"
        )


def assigned_cores() -> str:
    """The cores that this process was started with; "" if none."""
    return os.environ.get("PACELINE_CORES", "")


def without_cores(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables for a child of a worker, which must not inherit the worker's cores: Ray and fork hand them down."""
    return dict(env or {}) | {CORES: "", "PACELINE_CORES": ""}


def for_child(env: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The whole environment of a process that is started directly, without Ray."""
    return without_cores(os.environ) | dict(env)


def for_actor(env: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """What an actor adds to its job's variables: cores that a job gives to all its actors are not its own."""
    return without_cores() | dict(env)


def lock_folder() -> Path:
    """Where the locks of simulated cores lie."""
    return Path(os.environ.get("PACELINE_LOCKS") or scratch() / "cores")


def share_cpus(first: int, last: int) -> None:
    """Keep this process to its share of the host's CPUs, if the host has that many."""
    allowed = os.sched_getaffinity(0)
    share = set(range(first, last + 1))
    if share <= allowed:
        os.sched_setaffinity(0, share)


def scratch() -> Path:
    """Where this user's locks and sockets lie."""
    return Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"


def private(folder: Path) -> None:
    """Make sure of a folder that no other user can change; levels that are missing are made for this user alone.

    Raises:
        WorkerError: it, or a folder it is in, is another user's or can be written by others.
    """
    path = folder.absolute()
    for level in (*reversed(path.parents), path):  # no level is made in one that was not checked
        try:
            if not level.exists():
                level.mkdir(mode=0o700, exist_ok=True)
            status = level.lstat()
        except OSError as error:
            raise WorkerError(f"{folder} cannot be used ({error}); set TMPDIR to a folder of your own") from error
        if not _safe(status):
            raise WorkerError(
                f"{level} belongs to another user, or others can write there, so that {folder} cannot be trusted; "
                "remove it, or set TMPDIR (for locks of cores: PACELINE_LOCKS) to a folder of your own"
            )


def _safe(status: os.stat_result) -> bool:
    """Whether only we and the administrator can change what it holds; all may add to a sticky folder, such as /tmp."""
    if status.st_uid not in (0, os.getuid()):
        return False
    own_group = status.st_gid == os.getgid()
    closed = not status.st_mode & (stat.S_IWOTH | (0 if own_group else stat.S_IWGRP))
    return closed or stat.S_ISLNK(status.st_mode) or bool(status.st_mode & stat.S_ISVTX)
