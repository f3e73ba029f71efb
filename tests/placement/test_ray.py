"""Workers on real Ray: planned cores, the tokens of one process, and what happens when workers or nodes die."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from paceline.core.errors import (
    ConfigurationError,
    PlanError,
    PromptError,
    SamplingError,
    TargetLostError,
    WorkerError,
)
from paceline.placement import INSTANCES, Plan
from paceline.placement.cluster import nodes
from paceline.placement.cluster.core_allocator import NAME, CoreRequest, allocator
from paceline.placement.cluster.deployment import Deployment, launch
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.nodes import NAMESPACE
from paceline.placement.host import environment
from paceline.placement.host.core_locks import held
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.quota import Quota
from tests.decoder.tiny import Workshop
from tests.placement.launched import (
    POLICY,
    PROMPTS,
    SAMPLED,
    TIMEOUTS,
    drafts,
    entry,
    pid_of,
    planned,
    ranks_of,
    wait_for_draft,
    wanted,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module")
def pair(workshop: Workshop) -> Plan:
    return planned(entry(workshop, "chat"), entry(workshop, "chat-draft", "draft", draft_of="chat"))


@pytest.mark.ray
def test_faults_change_no_token(cluster: Cluster, workshop: Workshop, pair: Plan) -> None:
    """In one deployment, since starting is what takes time: calm, draft killed, target killed, target hung.

    A draft that hangs is another test's, on another node.
    """
    asked = {"max_new_tokens": 60, **SAMPLED}
    expected = wanted(workshop, PROMPTS, **asked)
    with launch(pair, fault_policy=replace(POLICY, stall_timeout_s=1, max_target_restarts=1)) as models:
        chat = models.group("chat").actor
        wait_for_draft(models, "chat")
        assert models.cores() == {"chat": CoreRange(0, 1), "chat-draft": CoreRange(2, 3)}
        assert models.sample("chat", PROMPTS, **asked) == expected
        health = models.statistics("chat")["drafter_health"]
        assert isinstance(health, dict) and health["answered"] > 0 == health["lost"]
        assert models.statistics("chat")["num_accepted_tokens"]
        for who, number in (
            ("chat-draft", signal.SIGKILL), ("chat", signal.SIGKILL), ("chat", signal.SIGSTOP),
        ):  # fmt: skip
            found = [list(prompt) for prompt in PROMPTS]
            pid = pid_of(models, who)
            for index, piece in enumerate(models.stream("chat", PROMPTS, **asked)):
                found[piece.index] += piece.tokens
                if index == 0:
                    os.kill(pid, number)
            assert found == expected, (who, number)
            end = time.monotonic() + 120
            while pid_of(models, who) in (pid, None) or not drafts(
                models, "chat"
            ):  # a hung drafter is noticed in rounds
                assert time.monotonic() < end, models.statistics("chat")
        assert models.cores()["chat"] == CoreRange(0, 1) and models.group("chat").restarts == 2
        with pytest.raises(PromptError, match="vocabulary"):
            models.sample("chat", [[10**6]])
        with pytest.raises(ConfigurationError, match="no target 'x'"):
            models.sample("x", PROMPTS)
        with pytest.raises(SamplingError, match="streamer"):
            models.sample("chat", PROMPTS, streamer=1)
        longer = {**asked, "max_new_tokens": 120}
        with pytest.raises(TargetLostError, match="lost 2 times") as lost:
            for _ in models.stream("chat", PROMPTS, **longer):
                ray.kill(chat("chat"))
        assert any(lost.value.tokens)
        for prompt, tokens, text in zip(PROMPTS, lost.value.tokens, wanted(workshop, PROMPTS, **longer), strict=True):
            assert text[len(prompt) :][: len(tokens)] == list(tokens)


@pytest.mark.ray
def test_models_side_by_side(cluster: Cluster, workshop: Workshop) -> None:
    """Two targets with one draft, and a large one: all used at once; the core allocator dies; one leaves and one comes.

    One deployment for all of it, since starting is what takes time.
    """
    asked = {"max_new_tokens": 40, **SAMPLED}
    expected = wanted(workshop, PROMPTS, **asked)
    shared = entry(
        workshop, "d", "draft", draft_of=["a", "b"], tp_degree=1, quota={"max_targets": 2, "weights": {"a": 2}}
    )
    with launch(
        planned(*(entry(workshop, n) for n in "ab"), shared, entry(workshop, "c", tp_degree=4)), fault_policy=POLICY
    ) as models:
        assert models.group("a").spec("d").quota == Quota(2, 256, {"a": 2.0})
        for name in "ab":
            wait_for_draft(models, name)
        assert together(models, asked) == dict.fromkeys("abc", expected)
        for name in "ab":
            health = models.statistics(name)["drafter_health"]
            assert isinstance(health, dict) and health["answered"] > 0 == health["lost"]
        one_reloads(models, asked, expected)
        allocator_dies(models, silent="c")
        models.stop("a")  # and with it its group: the other target of their draft, and the draft
        (left,) = models.fragmentation().values()
        assert (left.free, dict(left.runs)[8], dict(left.runs)[4]) == (20, 2, 5)
        models.add(planned(entry(workshop, "e", tp_degree=2)))  # planned on 0-1, where c is
        assert models.cores() == {"c": CoreRange(0, 3), "e": CoreRange(4, 5)}  # no whole run of eight is broken
        claims = [CoreRequest(name, 8, CoreRange(0, 7)) for name in "xyz"]
        node = models.group("c").spec("c").node
        with pytest.raises(PlanError, match="2 cores free but no aligned run of 8"):
            ray.get(allocator().claim.remote(node, INSTANCES["inf2.48xlarge"], claims))
        held = models.stream("c", PROMPTS[:1], max_new_tokens=100)
        next(held)  # its slot is taken: the other one waits, or shares rounds, and has its own tokens
        held.close()
        assert together(models, asked) == dict.fromkeys("ce", expected)


def together(models: Deployment, asked: dict) -> dict[str, list[list[int]]]:
    """What every target says to the prompts, in turns."""
    streams = {name: models.stream(name, PROMPTS, **asked) for name in models.models}
    texts = {name: [list(prompt) for prompt in PROMPTS] for name in streams}
    while streams:
        for name, stream in list(streams.items()):
            piece = next(stream, None)
            if piece is None:
                del streams[name]
            else:
                texts[name][piece.index] += piece.tokens
    return texts


def one_reloads(models: Deployment, asked: dict, expected: list[list[int]]) -> None:
    """While a dead target starts again, calls to another one of its group do not wait for it."""
    group, found = models.group("a"), []
    ray.kill(group.actor("a"))
    call = threading.Thread(target=lambda: found.append(models.sample("a", PROMPTS, **asked)))
    call.start()
    end = time.monotonic() + 120
    while not group.restarts:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert models.sample("b", PROMPTS[:1], max_new_tokens=1) and call.is_alive()
    call.join(60)
    assert found == [expected]


def allocator_dies(models: Deployment, *, silent: str) -> None:
    """It knows all cores again; those of a worker that cannot be asked, too."""
    keeper = ray.get_actor(NAME, NAMESPACE)
    taken = ray.get(keeper.taken.remote())
    pid = ray.get(models.group(silent).actor(silent).ready.remote()).process.pid
    os.kill(pid, signal.SIGSTOP)
    ray.kill(keeper, no_restart=False)
    assert ray.get(keeper.taken.remote(), timeout=30) == taken
    os.kill(pid, signal.SIGCONT)


@pytest.mark.ray
def test_a_divided_target_dies_with_its_ranks_and_comes_back(cluster: Cluster, workshop: Workshop) -> None:
    """Target and draft on two cores each, really: a core without Neuron is a rank's process."""
    asked = {"max_new_tokens": 40, **SAMPLED}
    expected = wanted(workshop, PROMPTS, **asked)
    entries = entry(workshop, "chat"), entry(workshop, "chat-draft", "draft", draft_of="chat")
    with launch(
        planned(*entries),
        fault_policy=FaultPolicy(
            startup_timeout_s=90, stall_timeout_s=20, placement_timeout_s=30, draft_timeouts=TIMEOUTS
        ),
    ) as models:
        wait_for_draft(models, "chat")
        for restarts, lost in enumerate(("worker", "rank"), 1):
            found = [list(prompt) for prompt in PROMPTS]
            pid = pid_of(models, "chat")
            assert pid is not None and len(ranks_of(pid)) == 1
            ranks = ranks_of(pid)
            for index, piece in enumerate(models.stream("chat", PROMPTS, **asked)):
                found[piece.index] += piece.tokens
                if index == 0:
                    os.kill(pid if lost == "worker" else ranks[0], signal.SIGKILL)
            assert found == expected and models.group("chat").restarts == restarts, lost
            end = time.monotonic() + 120
            while any(Path(f"/proc/{process}").exists() for process in (pid, *ranks)):
                assert time.monotonic() < end
                time.sleep(0.1)
        assert models.statistics("chat")["num_accepted_tokens"]
        left = threading.Thread(target=abandoned, args=(models, asked, ranks_of(pid_of(models, "chat") or 0)))
        left.start()
        end = time.monotonic() + 120
        while models.group("chat").restarts < 3:
            assert time.monotonic() < end
            time.sleep(0.01)
    left.join(60)  # who leaves in the middle of a restart leaves nothing: see `nothing_left`
    assert not left.is_alive()


def abandoned(models: Deployment, asked: dict, ranks: list[int]) -> None:
    """A call whose target dies, and is stopped for good while it is brought back."""
    with pytest.raises(TargetLostError, match="stopped"):
        for _ in models.stream("chat", PROMPTS, **asked):
            with suppress(ProcessLookupError):
                os.kill(ranks[0], signal.SIGKILL)


@pytest.mark.ray
def test_a_worker_refuses_what_was_not_planned(cluster: Cluster, pair: Plan) -> None:
    first = replace(pair.placements[0], env=(*pair.placements[0].env, ("NEURON_RT_VISIBLE_CORES", "4-5")))
    with pytest.raises(WorkerError, match="not started as planned"):
        launch(replace(pair, placements=(first,)), fault_policy=POLICY)


@pytest.mark.ray
def test_a_task_of_a_worker_does_not_inherit_its_cores(cluster: Cluster) -> None:
    """An actor with cores asks for one. Both travel as they stand here: their processes import nothing of ours."""
    names = environment.CORES, "PACELINE_CORES"

    class Worker:
        def seen(self, task: object) -> list[list[str | None]]:
            return [[os.environ.get(name) for name in names], ray.get(task.remote(), timeout=60)]  # type: ignore[attr-defined]

    task = nodes._on(ray.get_runtime_context().get_node_id(), lambda: [os.environ.get(name) for name in names])
    options = {"num_cpus": 0, "runtime_env": {"env_vars": dict.fromkeys(names, "4-5")}}
    worker = ray.remote(Worker).options(**options).remote()
    assert ray.get(worker.seen.remote(task), timeout=90) == [["4-5"] * 2, [""] * 2]
    ray.kill(worker)


@pytest.mark.ray
def test_a_draft_on_another_node_is_called_over_tcp(cluster: Cluster, workshop: Workshop) -> None:
    """Room for a target here and for its draft there: only a group that may part fits. It hangs; its node is lost."""
    apart = planned(entry(workshop, "chat", tp_degree=4), entry(workshop, "chat-draft", "draft", draft_of="chat"))
    asked = {"max_new_tokens": 60, **SAMPLED}
    expected = wanted(workshop, PROMPTS, **asked)
    other = cluster.add_node(num_cpus=1, resources={"neuron_cores": 24, "other": 1}, object_store_memory=100 << 20)
    blocked = ray.util.placement_group(
        [{"neuron_cores": 20, "node:__internal_head__": 0.1}, {"neuron_cores": 22, "other": 0.1}]
    )
    try:
        assert blocked.wait(10)
        with pytest.raises(PlanError, match="colocate"):
            launch(apart, fault_policy=replace(POLICY, placement_timeout_s=2))
        with launch(apart, fault_policy=replace(POLICY, colocate=False)) as models:
            chat, draft = (models.group("chat").spec(label) for label in ("chat", "chat-draft"))
            assert chat.node != draft.node == other.node_id and chat.address == draft.address
            assert draft.address is not None and draft.address.port and chat.secret not in str(draft).encode()
            wait_for_draft(models, "chat")
            pid = pid_of(models, "chat-draft")
            assert pid is not None
            assert models.sample("chat", PROMPTS, **asked) == expected
            health = models.statistics("chat")["drafter_health"]
            assert isinstance(health, dict) and health["answered"] > 0 == health["lost"]
            os.kill(pid, signal.SIGSTOP)
            end = time.monotonic() + 120
            while pid_of(models, "chat-draft") in (pid, None) or not drafts(models, "chat"):
                assert models.sample("chat", PROMPTS, **asked) == expected
                assert time.monotonic() < end, models.statistics("chat")
            gone = threading.Thread(target=cluster.remove_node, args=(other, False))
            gone.start()
            end, state = time.monotonic() + 120, None
            while state != "down":  # the node is lost in the middle of a request, or between two
                assert models.sample("chat", PROMPTS, **asked) == expected
                health = models.statistics("chat")["drafter_health"]
                assert isinstance(health, dict)
                state = health["state"]
                assert time.monotonic() < end, health
            gone.join()
            assert models.sample("chat", PROMPTS, **asked) == expected
            health = models.statistics("chat")["drafter_health"]
            assert isinstance(health, dict) and health["state"] == "down" and health["skipped"] > 0
            assert models.group("chat").moves == models.group("chat").restarts == 0
    finally:
        ray.util.remove_placement_group(blocked)
        if other in cluster.worker_nodes:
            cluster.remove_node(other)


@pytest.mark.ray
def test_a_request_survives_the_loss_of_its_node(cluster: Cluster, workshop: Workshop, pair: Plan) -> None:
    asked = {"max_new_tokens": 60, **SAMPLED}
    expected = wanted(workshop, PROMPTS, **asked)
    other = cluster.add_node(num_cpus=1, resources={"neuron_cores": 24, "other": 1}, object_store_memory=100 << 20)
    blocked = ray.util.placement_group([{"neuron_cores": 24, "node:__internal_head__": 0.1}])
    assert blocked.wait(10)  # so that the group goes to the other node
    with launch(pair, fault_policy=POLICY) as models:
        ray.util.remove_placement_group(blocked)
        found = [list(prompt) for prompt in PROMPTS]
        here, pid = models.group("chat").spec("chat").node, pid_of(models, "chat")
        assert pid is not None
        for index, piece in enumerate(models.stream("chat", PROMPTS, **asked)):
            found[piece.index] += piece.tokens
            if index == 0:
                os.kill(pid, signal.SIGSTOP)  # or it might make the whole answer before its node is gone
                cluster.remove_node(other, allow_graceful=False)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        assert found == expected
        assert models.group("chat").moves == 1 and models.group("chat").spec("chat").node != here
        assert models.sample("chat", PROMPTS, **asked) == expected


@pytest.mark.ray
def test_ray_chooses_no_core_for_ours(cluster: Cluster) -> None:
    """Another program's actor holds the first cores; ours sees what was planned, and what asks for none sees none.

    What travels stands here: its processes import nothing of ours.
    """

    class Seen:
        def cores(self, name: str) -> str | None:
            return os.environ.get(name)

    def seen(cores: int, **variables: str) -> str | None:
        options = {"num_cpus": 0, "resources": {nodes.RESOURCE: cores}, "runtime_env": {"env_vars": variables}}
        actors.append(ray.remote(Seen).options(**options).remote())  # type: ignore[arg-type]
        return ray.get(actors[-1].cores.remote(environment.CORES), timeout=60)  # type: ignore[no-any-return]

    actors: list[ray.actor.ActorHandle] = []
    machine, planned_on = INSTANCES["inf2.48xlarge"], CoreRange(0, 1)
    env = environment.planned(machine, planned_on, label="chat", threads=1, timeout=60)
    try:
        assert seen(2) == "0,1", "Ray gives the first ids that are free to who asks in no other way"
        assert seen(2, **environment.for_actor(env)) == str(planned_on)
        assert seen(2, **{environment.NOSET: "1"}) is None, "with this switch it gives none"
        assert seen(0) is None, "without any the runtime takes all cores"
        assert seen(0, **environment.without_cores()) == ""
    finally:
        for actor in actors:
            ray.kill(actor)


@pytest.mark.ray
def test_two_processes_never_share_a_core_whatever_their_variables_say(cluster: Cluster) -> None:
    """A user's variables put both on the same cores, and Ray counts them as two on different ones."""

    class Holder:
        def take(self, node: str) -> str:
            from paceline.core.errors import CoresBusyError
            from paceline.placement.host.core_locks import CoreLocks
            from paceline.placement.planning.core_range import CoreRange

            self.locks = CoreLocks(CoreRange(0, 1), node=node)
            try:
                self.locks.acquire()
            except CoresBusyError:
                return "busy"
            return os.environ["NEURON_RT_VISIBLE_CORES"]

    node = ray.get_runtime_context().get_node_id()
    options = {"num_cpus": 0, "resources": {nodes.RESOURCE: 2}, "runtime_env": {"env_vars": {environment.CORES: "0-1"}}}
    holders = [ray.remote(Holder).options(**options).remote() for _ in range(2)]
    try:
        assert ray.get(holders[0].take.remote(node), timeout=60) == "0-1"
        assert ray.get(holders[1].take.remote(node), timeout=60) == "busy"
    finally:
        for holder in holders:
            ray.kill(holder)


@pytest.mark.ray
def test_a_target_keeps_its_cores_over_a_restart_with_a_hole_below(cluster: Cluster, workshop: Workshop) -> None:
    """Ray would give it the lowest free ids; its range comes from the allocator and is checked when it starts."""
    with launch(planned(entry(workshop, "a"), entry(workshop, "b")), fault_policy=POLICY) as models:
        assert models.cores() == {"a": CoreRange(0, 1), "b": CoreRange(2, 3)}
        pid = pid_of_in(models, "b")
        models.stop("a")
        os.kill(pid, signal.SIGKILL)
        assert models.sample("b", PROMPTS[:1], max_new_tokens=4) == wanted(workshop, PROMPTS[:1], max_new_tokens=4)
        assert models.group("b").restarts == 1 and models.cores() == {"b": CoreRange(2, 3)}
        again = pid_of_in(models, "b")
        variables = Path(f"/proc/{again}/environ").read_bytes().split(b"\0")
        assert again != pid and b"NEURON_RT_VISIBLE_CORES=2-3" in variables


def pid_of_in(models: Deployment, target: str) -> int:
    """The process that holds the cores of a target of a group of its own."""
    spec = models.group(target).spec(target)
    return held(spec.node)[spec.cores.first]
