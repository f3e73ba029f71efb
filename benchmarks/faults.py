"""Measure what clients see when processes of a service die or stop, when a node is lost, and when clients misbehave.

    python -m benchmarks.faults --target DIR --draft DIR [--pairs] [--proxy] [--node] [--clients] [--soak SECONDS]
    python -m benchmarks.faults ... --state done.jsonl --limit-s 240     # in pieces, each of which continues

For each fault, streams at temperature 0.8 are begun, processes are killed or stopped (SIGKILL, SIGSTOP) in the middle,
with ``--pairs`` every two of them within 5 seconds, and each text is compared with that of the same request without a
fault. ``--proxy``: Ray Serve's proxy listens, as in a cluster that was joined; it takes part in every fault.
``--node``: the node that runs the model goes. ``--clients``: some read slowly, others leave. ``--soak``: streams for so
long, of which some clients leave; the memory of every process is read. Prints JSON, on its last line:
equal      streams with the same text
typed      streams that ended with an error object
broken     streams whose connection broke (possible only where ingress or proxy died)
different  streams that ended well, with another text: there should be none
pause_s    longest time between two pieces of a stream
whole_s    from the fault until every model is ready and a new request is answered
unanswered how often the service said meanwhile that it was ready, and a new request got no answer
left       processes and locks of cores that are there 60 seconds later and were not there before, and processes that
           were stopped and that nobody has replaced; null: not looked for
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any

import ray
from ray import serve
from ray._private.ray_constants import PROCESS_TYPE_RAYLET  # what a node calls its processes; no public name
from ray.cluster_utils import Cluster

from benchmarks.fault_clients import GIVE_UP_S, Client, Stream, Whole
from benchmarks.service_processes import cluster, count_processes, descendants, is_stopped, memory, processes
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.host import environment
from paceline.placement.host.core_locks import held
from paceline.placement.planning.groups import ReplicaGroupPlan, plan_groups
from paceline.placement.planning.instances import host_cpus
from paceline.placement.planning.model_specs import models_of
from paceline.serving.ray_app import ListeningSocket, application
from paceline.serving.settings import ApiSettings


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row of the table; see `benchmarks.faults`."""

    fault: str
    streams: int
    equal: int
    typed: int
    broken: int
    different: int
    pause_s: float
    whole_s: float
    unanswered: int | None = None
    left: int | None = None


def outcome(fault: str, ended: Sequence[Stream], wanted: Sequence[str], whole: Whole) -> Outcome:
    equal = sum(stream.text == text and not stream.error for stream, text in zip(ended, wanted, strict=True))
    typed, broken = (sum(stream.error == kind for stream in ended) for kind in ("typed", "broken"))
    pause = max((stream.pause_s for stream in ended), default=0.0)
    different = len(ended) - equal - typed - broken
    return Outcome(
        fault, len(ended), equal, typed, broken, different, round(pause, 1), round(whole.seconds, 1), whole.unanswered
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """The rows for a page, under the names that it has for processes."""
    lines = [
        "| fault | same text | error object | broken | longest pause, s | whole again, s | ready, no answer | left |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        names = one.fault.replace("model:big", "replica").replace("allocator", "core allocator")
        same = f"{one.equal} of {one.streams}" + (f" ({one.different} another)" if one.different else "")
        pause = None if one.broken == one.streams else one.pause_s  # of streams that went on after it
        numbers = (one.typed, one.broken, pause, one.whole_s, one.unanswered, one.left)
        cells = " | ".join("-" if number is None else str(number) for number in numbers)
        lines.append(f"| {names} | {same} | {cells} |")
    return "\n".join(lines)


class Record:
    """Results of this run, and of earlier ones where a file has them. ``limit_s``: seconds after which no fault is
    started.
    """

    def __init__(self, file: Path | None, limit_s: float) -> None:
        lines = file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else []
        self._file, self._end = file, time.monotonic() + limit_s
        self.outcomes = [Outcome(**json.loads(line)) for line in lines]

    def is_open(self, fault: str, streams: int) -> bool:
        known = {(one.fault, one.streams) for one in self.outcomes}
        return (fault, streams) not in known and time.monotonic() < self._end

    def note(self, rows: Sequence[Outcome]) -> None:
        self.outcomes.extend(rows)
        for row in rows:
            print(row, flush=True)
            if self._file is not None:
                with self._file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(asdict(row)) + "\n")


KINDS = ("model:big", "draft", "ingress", "controller", "allocator", "lifecycle")
PROXY = "proxy"
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_BETWEEN_S = 0.5  # between the two faults of a pair: streams that are not held up end a second later
_AT_A_TIME = 8  # streams without a fault, for the texts that are wanted
_SLOW_S = 0.3  # between the reads of a slow client
_NODE = "loss of a node"
_LEAVE_S = 60.0  # for what is replaced to end
_LOCK, _STOPPED = "lock of a core", "stopped"
_REQUESTS_PER_KEY = 1 << 16  # a limit that nobody reaches: a service that has one has the actor of the lifecycle
_GROWTH = 1.1  # of the memory of a process in a soak, its last third over its middle third, that is bounded


def under_streams(client: Client, fault: str, strike: Callable[[], None], wanted: Sequence[str]) -> Outcome:
    """A fault under as many streams as texts are wanted; ``strike`` does it when all have begun."""
    begun = Barrier(len(wanted) + 1)
    with ThreadPoolExecutor(len(wanted)) as pool:
        streams: list[Future[Stream]] = [pool.submit(client.stream, seed, begun) for seed in range(len(wanted))]
        with suppress(BrokenBarrierError):
            begun.wait(GIVE_UP_S)
        begin = time.monotonic()
        strike()
        struck_s = time.monotonic() - begin
        whole = client.wait_until_whole()
        whole = replace(whole, seconds=struck_s + whole.seconds)
        ended = [stream.result(GIVE_UP_S) for stream in streams]
    return outcome(fault, ended, wanted, whole)


def name_of(victims: Sequence[str], number: int) -> str:
    return f"{'kill -9' if number == signal.SIGKILL else 'SIGSTOP'} {' + '.join(victims)}"


def strike_processes(client: Client, victims: Sequence[str], number: int, wanted: Sequence[str]) -> Outcome:
    """Processes are killed or stopped, one after the other."""
    pids = [_waited_for(victim) for victim in victims]

    def strike() -> None:
        for place, pid in enumerate(pids):
            time.sleep(_BETWEEN_S if place else 0)
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    try:
        found = under_streams(client, name_of(victims, number), strike, wanted)
        return replace(found, left=_left_over(client, pids))
    finally:
        for pid in pids:  # one that was stopped, and that nobody has replaced, goes on
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _left_over(client: Client, victims: Sequence[int]) -> int:
    """Leftovers: processes beyond one of each kind and one core for each model, and victims still suspended; a
    replacement has a minute to end. Streams continue: a draft is called in rounds only, and not for the last token.
    """
    due = Counter(dict.fromkeys((*KINDS, PROXY), 1) | {_LOCK: 2})
    end = time.monotonic() + _LEAVE_S
    while True:
        locks = sum(len(held(node["NodeID"])) for node in ray.nodes() if node["Alive"])
        more = count_processes(os.getpid()) + Counter({_LOCK: locks}) - due
        more += Counter({_STOPPED: sum(map(is_stopped, victims))})
        if not more or time.monotonic() > end:
            break
        client.stream(0)
        time.sleep(1)
    if more:
        print(f"left over: {dict(more)}", flush=True)
    return sum(more.values())


def _waited_for(victim: str) -> int:
    end = time.monotonic() + GIVE_UP_S
    while (pid := processes(os.getpid()).get(victim)) is None:
        if time.monotonic() > end:
            raise RuntimeError(f"{victim} is not back")
        time.sleep(0.2)
    return pid


def bad_clients(client: Client, wanted: Sequence[str]) -> list[Outcome]:
    """Half of the streams are read slowly, then half of them leave; and how soon their slots are free."""
    half = len(wanted) // 2
    rows = []
    for fault, options in (("slow clients", {"chunk_s": _SLOW_S}), ("vanishing clients", {"leave": 3})):
        with ThreadPoolExecutor(len(wanted)) as pool:
            begin = time.monotonic()
            odd = [pool.submit(client.stream, seed, **options) for seed in range(half)]  # type: ignore[arg-type]
            usual = [pool.submit(client.stream, seed) for seed in range(half, len(wanted))]
            ended = [stream.result(GIVE_UP_S) for stream in usual]
            seconds = Whole(time.monotonic() - begin, 0)
            rows.append(outcome(f"{fault}: the others", ended, wanted[half:], seconds))
            left = [stream.result(GIVE_UP_S) for stream in odd]
        if "leave" not in options:
            rows.append(outcome(f"{fault}: themselves", left, wanted[:half], client.wait_until_whole()))
        else:
            idle = Whole(client.seconds_until_idle(), 0)
            rows.append(outcome(f"{fault}: until every slot is free", [], [], idle))
    return rows


def soak(client: Client, seconds: float, *, streams: int) -> dict[str, Any]:
    """Streams for so long, every third of whose clients leaves; MiB of each process over the time."""
    end = time.monotonic() + seconds
    done, wrong = [0, 0], list[str]()
    texts: dict[int, str] = {}

    def work(number: int) -> None:
        place = number
        while time.monotonic() < end:
            seed = place % 16
            stream = client.stream(seed, leave=2 if place % 3 == 0 else 0)
            if place % 3 == 0:
                done[1] += 1
            elif stream.error or texts.setdefault(seed, stream.text) != stream.text:
                wrong.append(stream.error or "another text")
            done[0] += 1
            place += streams

    threads = [Thread(target=work, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    seen: list[dict[str, float]] = []
    while any(thread.is_alive() for thread in threads):
        seen.append(memory(os.getpid()))
        time.sleep(max(1.0, seconds / 60))
    third = len(seen) // 3
    kinds = {kind: [one[kind] for one in seen if kind in one] for kind in KINDS}
    growth = {
        kind: [round(sizes[0]), round(max(sizes[third : 2 * third])), round(max(sizes[2 * third :]))]
        for kind, sizes in kinds.items()
        if len(sizes) > 2 * third > 0
    }
    bounded = all(after <= before * _GROWTH for _, before, after in growth.values())
    return {
        "seconds": seconds, "requests": done[0], "left": done[1], "wrong": len(wrong), "bounded": bounded,
        "mib_at_start_in_middle_and_last_third": growth, "idle_again_s": client.seconds_until_idle(),
    }  # fmt: skip


def groups_of(target: Path, draft: Path, *, backend: str, slots: int) -> tuple[ReplicaGroupPlan, ...]:
    """A model with a draft in its own process."""
    shape = {"amp": "f32", "backend": backend, "batch_size": slots, "n_positions": 128}
    entries = [
        {"name": "big", "path": str(target.resolve()), **shape},
        {"name": "small", "path": str(draft.resolve()), "draft_of": "big", "k": 3, **shape},
    ]
    return plan_groups(models_of(entries, folder=Path(), where="benchmark"), host_cpus())


def deploy(groups: Sequence[ReplicaGroupPlan], listening: ListeningSocket, *, proxy: bool = False) -> str:
    """Serve them in the cluster of this process, as `paceline serve` does. A socket that is closed at once gives a free
    port, on which Serve's proxy listens, one for all nodes of a test cluster, which share a machine. -> the address
    """
    port = listening.port
    if proxy:
        listening.close()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    else:
        serve.start(proxy_location="Disabled")
    settings = ApiSettings(max_requests_per_key=_REQUESTS_PER_KEY)
    handover = "" if proxy else listening.handover
    app = application(groups, FaultPolicy(startup_timeout_s=170), settings, handover=handover)
    serve.run(app, name="paceline", route_prefix="/", external_scaler_enabled=True)
    return f"http://127.0.0.1:{port}"


@contextmanager
def service(groups: Sequence[ReplicaGroupPlan], *, proxy: bool = False) -> Iterator[str]:
    """On a cluster of one node. Yields the address."""
    with cluster(), ListeningSocket("127.0.0.1", 0) as listening:
        yield deploy(groups, listening, proxy=proxy)


def lose_node(groups: Sequence[ReplicaGroupPlan], *, tokens: int, streams: int) -> Outcome:
    """Two nodes and a head, which has the HTTP process and no cores: the node that runs the model is lost."""
    environment.prepare_new_cluster()
    cores = sum(groups[0].num_cores)
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    with ExitStack() as stack:
        stack.callback(nodes.shutdown)
        ray.init(address=nodes.address, log_to_driver=False)
        stack.callback(ray.shutdown)
        listening = stack.enter_context(ListeningSocket("127.0.0.1", 0))
        deploying = ThreadPoolExecutor(1).submit(deploy, groups, listening)
        _waited_for("ingress")  # on the head, while there is no other node
        first = nodes.add_node(num_cpus=1, resources={"neuron_cores": cores})
        client = Client(deploying.result(GIVE_UP_S), tokens=tokens)
        client.wait_until_whole()
        wanted = [client.stream(seed).text for seed in range(streams)]
        nodes.add_node(num_cpus=1, resources={"neuron_cores": cores})
        return under_streams(client, _NODE, lambda: _switch_off(nodes, first), wanted)


def _switch_off(cluster: Cluster, node: Any) -> None:
    """All processes of a node at once; without this, those of actors see that it is gone, and answer until they do."""
    (raylet,) = node.all_processes[PROCESS_TYPE_RAYLET]
    for pid in [raylet.process.pid, *descendants(raylet.process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=110)
    parser.add_argument("--only", nargs="*", default=list(KINDS), help=f"some of {', '.join(KINDS)}; nothing: none")
    parser.add_argument("--signals", nargs="*", default=list(_SIGNALS), choices=list(_SIGNALS))
    parser.add_argument("--pairs", action="store_true", help="every two of them, instead of every one")
    parser.add_argument("--proxy", action="store_true", help="Ray Serve's proxy listens, and takes part in every fault")
    parser.add_argument("--node", action="store_true", help="the loss of a node, too")
    parser.add_argument("--clients", action="store_true", help="slow and vanishing clients, too")
    parser.add_argument("--soak", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--state", type=Path, help="file of results, which a later run continues")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no fault after so many seconds")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page first")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    record, soaked = Record(options.state, options.limit_s), None
    groups = groups_of(options.target, options.draft, backend=options.backend, slots=options.slots)
    kinds = [*options.only, PROXY] if options.proxy else options.only
    victims = [
        names
        for names in itertools.combinations(kinds, 2 if options.pairs else 1)
        if not options.proxy or PROXY in names
    ]
    faults = [
        (names, _SIGNALS[name])
        for name, names in itertools.product(options.signals, victims)
        if record.is_open(name_of(names, _SIGNALS[name]), options.streams)
    ]
    clients = options.clients and record.is_open("slow clients: the others", options.streams - options.streams // 2)
    if faults or clients or options.soak:
        with service(groups, proxy=options.proxy) as url:
            client = Client(url, tokens=options.tokens)
            client.wait_until_whole()
            with ThreadPoolExecutor(_AT_A_TIME) as pool:
                wanted = [one.text for one in pool.map(client.stream, range(options.streams))]
            for names, number in faults:
                if record.is_open(name_of(names, number), options.streams):
                    record.note([strike_processes(client, names, number, wanted)])
            if clients:
                record.note(bad_clients(client, wanted))
            if options.soak:
                soaked = soak(client, options.soak, streams=options.streams)
    if options.node and record.is_open(_NODE, options.streams):
        record.note([lose_node(groups, tokens=options.tokens, streams=options.streams)])
    if options.markdown:
        print(table(record.outcomes))
    print(json.dumps({"faults": [asdict(one) for one in record.outcomes], "soak": soaked}))


if __name__ == "__main__":
    main()
