"""`launch` on real Ray: planned cores, the tokens of one process, and what happens when processes or nodes die."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from paceline.core.errors import ConfigurationError, PlanError, PromptError, SamplingError, WorkerError
from paceline.placement import INSTANCES, Deployment, launch
from paceline.placement.cluster import nodes
from paceline.placement.cluster.core_allocator import NAME, CoreRequest, allocator
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.nodes import NAMESPACE
from paceline.placement.host import environment
from paceline.placement.planning.core_range import CoreRange
from tests.decoder.tiny import Workshop
from tests.placement.launched import (
    POLICY,
    PROMPTS,
    SAMPLED,
    TIMEOUTS,
    drafts,
    entry,
    pid_on,
    planned,
    ranks_of,
    wait_for_draft,
    wanted,
)
from tests.waiting import until

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.ray]
ASKED = {"max_new_tokens": 60, **SAMPLED}


def said_while(models: Deployment, pid: int) -> list[list[int]]:
    """Tokens of "chat" when a process is killed after its first tokens."""
    found = [list(prompt) for prompt in PROMPTS]
    for index, piece in enumerate(models.stream("chat", PROMPTS, **ASKED)):
        found[piece.index] += piece.tokens
        if index == 0:
            os.kill(pid, signal.SIGKILL)
    return found


@pytest.mark.full
def test_concurrent_models_and_their_deaths_change_no_token(cluster: Cluster, workshop: Workshop) -> None:
    """One deployment for all of it, since starting is what takes time."""
    expected = wanted(workshop, PROMPTS, **ASKED)
    made = planned(
        entry(workshop, "chat"),
        entry(workshop, "b"),
        entry(workshop, "d", "draft", draft_of=["chat", "b"], tp_degree=1),
        entry(workshop, "c", tp_degree=4),
    )
    with launch(made, fault_policy=POLICY) as models:
        cores = models.cores()
        assert cores == {item.label: item.cores for item in made.placements}
        wait_for_draft(models, "chat")
        assert together(models) == dict.fromkeys(["chat", "b", "c"], expected)
        health = models.statistics("chat")["drafter_health"]
        assert health["answered"] > 0 == health["lost"] and models.statistics("chat")["num_accepted_tokens"]
        (draft,) = (item.label for item in made.placements if ("chat", 0) in item.drafts_for)
        for who in draft, "chat":
            pid = pid_on(cores[who])
            assert pid is not None and said_while(models, pid) == expected, who
            until(lambda: pid_on(models.cores().get(who, cores[who])) not in (pid, None) and drafts(models, "chat"))  # noqa: B023
        for wrong, kind, says in (
            (("chat", [[10**6]]), PromptError, "vocabulary"),
            (("x", PROMPTS), ConfigurationError, "got 'x'"),
        ):
            with pytest.raises(kind, match=says):
                models.sample(*wrong)
        with pytest.raises(SamplingError, match="streamer"):
            models.sample("chat", PROMPTS, streamer=1)
        allocator_dies(cores["c"])
        come_and_go(models, workshop, expected)


def come_and_go(models: Deployment, workshop: Workshop, expected: list[list[int]]) -> None:
    """One leaves and one comes, which finds other cores than it was planned on."""
    for name in ("chat", "b"):
        models.stop(name)
    (left,) = models.fragmentation().values()
    assert (left.free, dict(left.runs)[8], dict(left.runs)[4]) == (20, 2, 5)
    models.add(planned(entry(workshop, "e", tp_degree=2)))  # planned on 0-1, where c is
    assert models.cores() == {"c": CoreRange(0, 3), "e": CoreRange(4, 5)}  # no whole run of eight is broken
    claims = [CoreRequest(name, CoreRange(0, 7)) for name in "xyz"]
    with pytest.raises(PlanError, match="2 cores are free"):
        ray.get(allocator().claim.remote(ray.get_runtime_context().get_node_id(), INSTANCES["inf2.48xlarge"], claims))
    given_up = models.stream("c", PROMPTS[:1], max_new_tokens=100)
    next(given_up)
    given_up.close()
    assert together(models) == dict.fromkeys("ce", expected)


def together(models: Deployment) -> dict[str, list[list[int]]]:
    """Responses of every target to the prompts, in turns."""
    streams = {name: models.stream(name, PROMPTS, **ASKED) for name in models.models}
    texts = {name: [list(prompt) for prompt in PROMPTS] for name in streams}
    while streams:
        for name, stream in list(streams.items()):
            piece = next(stream, None)
            if piece is None:
                del streams[name]
            else:
                texts[name][piece.index] += piece.tokens
    return texts


def allocator_dies(silent: CoreRange) -> None:
    """The allocator knows all cores again, those of a process that does not respond too."""
    keeper = ray.get_actor(NAME, NAMESPACE)
    taken, pid = ray.get(keeper.taken.remote()), pid_on(silent)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    ray.kill(keeper, no_restart=False)
    assert ray.get(keeper.taken.remote(), timeout=30) == taken
    os.kill(pid, signal.SIGCONT)


@pytest.mark.full
def test_a_tensor_parallel_target_dies_with_its_ranks_and_recovers(cluster: Cluster, workshop: Workshop) -> None:
    """Target and draft on two cores each, really: a core without Neuron is a rank's process."""
    expected = wanted(workshop, PROMPTS, **ASKED)
    made = planned(entry(workshop, "chat"), entry(workshop, "chat-draft", "draft", draft_of="chat"))
    with launch(made, fault_policy=FaultPolicy(startup_timeout_s=240, draft_timeouts=TIMEOUTS)) as models:
        wait_for_draft(models, "chat")
        pid = pid_on(models.cores()["chat"])
        assert pid is not None
        ranks = ranks_of(pid)
        assert len(ranks) == 1
        assert said_while(models, ranks[0]) == expected
        until(lambda: not any(Path(f"/proc/{process}").exists() for process in (pid, *ranks)), pause_s=0.1)


def test_a_model_that_cannot_be_loaded_is_reported_and_nothing_is_left(cluster: Cluster, workshop: Workshop) -> None:
    made = planned(entry(workshop, "chat"))
    (item,) = made.placements
    broken = replace(item, model=replace(item.model, folder=Path("no such folder")))
    with pytest.raises(WorkerError):
        launch(replace(made, placements=(broken,)), fault_policy=POLICY)


def test_a_task_of_a_worker_does_not_inherit_its_cores(cluster: Cluster) -> None:
    """An actor with cores asks for one. Both are sent by value: their processes import nothing of ours."""
    names = environment.CORES, "PACELINE_CORES"

    class Worker:
        def seen(self, task: object) -> list[list[str | None]]:
            return [[os.environ.get(name) for name in names], ray.get(task.remote(), timeout=60)]  # type: ignore[attr-defined]

    task = nodes._on(ray.get_runtime_context().get_node_id(), lambda: [os.environ.get(name) for name in names])
    options = {"num_cpus": 0, "runtime_env": {"env_vars": dict.fromkeys(names, "4-5")}}
    worker = ray.remote(Worker).options(**options).remote()
    assert ray.get(worker.seen.remote(task), timeout=90) == [["4-5"] * 2, [""] * 2]
    ray.kill(worker)


@pytest.mark.full
def test_a_draft_on_another_node_is_called_over_tcp_and_may_be_lost(cluster: Cluster, workshop: Workshop) -> None:
    """Cores for a target on one node and for its draft on another: only a group that may be split fits."""
    apart = planned(entry(workshop, "chat", tp_degree=4), entry(workshop, "chat-draft", "draft", draft_of="chat"))
    expected = wanted(workshop, PROMPTS, **ASKED)
    other = cluster.add_node(num_cpus=1, resources={"neuron_cores": 24, "other": 1}, object_store_memory=100 << 20)
    blocked = ray.util.placement_group(
        [{"neuron_cores": 20, "node:__internal_head__": 0.1}, {"neuron_cores": 22, "other": 0.1}]
    )
    try:
        assert blocked.wait(10)
        with pytest.raises(PlanError, match="colocate"):
            launch(apart, fault_policy=replace(POLICY, placement_timeout_s=2))
        with launch(apart, fault_policy=replace(POLICY, colocate=False)) as models:
            wait_for_draft(models, "chat")
            assert models.sample("chat", PROMPTS, **ASKED) == expected
            cores = models.cores()
            pid = pid_on(cores["chat-draft"], other.node_id)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

            def drafts_again() -> bool:
                assert models.sample("chat", PROMPTS, **ASKED) == expected
                return pid_on(cores["chat-draft"], other.node_id) not in (pid, None) and drafts(models, "chat")

            until(drafts_again)
    finally:
        ray.util.remove_placement_group(blocked)
        if other in cluster.worker_nodes:
            cluster.remove_node(other)


def test_a_request_survives_the_loss_of_its_node(cluster: Cluster, workshop: Workshop) -> None:
    expected = wanted(workshop, PROMPTS, **ASKED)
    other = cluster.add_node(num_cpus=1, resources={"neuron_cores": 24, "other": 1}, object_store_memory=100 << 20)
    blocked = ray.util.placement_group([{"neuron_cores": 24, "node:__internal_head__": 0.1}])
    assert blocked.wait(10)  # so that the model goes to the other node
    with launch(planned(entry(workshop, "chat")), fault_policy=POLICY) as models:
        ray.util.remove_placement_group(blocked)
        found = [list(prompt) for prompt in PROMPTS]
        pid = pid_on(models.cores()["chat"], other.node_id)
        assert pid is not None
        for index, piece in enumerate(models.stream("chat", PROMPTS, **ASKED)):
            found[piece.index] += piece.tokens
            if index == 0:
                os.kill(pid, signal.SIGSTOP)  # or it might make the whole answer before its node is gone
                cluster.remove_node(other, allow_graceful=False)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        assert found == expected
        assert pid_on(models.cores()["chat"]) is not None, "it is here now"
        assert models.sample("chat", PROMPTS, **ASKED) == expected


def test_ray_assigns_no_core_to_our_workers(cluster: Cluster) -> None:
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
    env = environment.planned(machine, planned_on, label="chat", threads=1)
    try:
        assert seen(2) == "0,1", "Ray gives the first ids that are free to who asks in no other way"
        assert seen(2, **environment.for_actor(env)) == str(planned_on)
        assert seen(2, **{environment.NOSET: "1"}) is None, "with this switch it gives none"
        assert seen(0) is None, "without any the runtime takes all cores"
        assert seen(0, **environment.without_cores()) == ""
    finally:
        for actor in actors:
            ray.kill(actor)


def test_processes_never_share_a_core_even_with_wrong_variables(cluster: Cluster) -> None:
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


@pytest.mark.full
def test_a_restarted_target_holds_its_reported_cores(cluster: Cluster, workshop: Workshop) -> None:
    """Ray would give it the lowest free ids; its range comes from the allocator, though there is a hole below."""
    with launch(planned(entry(workshop, "a"), entry(workshop, "b")), fault_policy=POLICY) as models:
        assert models.cores() == {"a": CoreRange(0, 1), "b": CoreRange(2, 3)}
        pid = pid_on(CoreRange(2, 3))
        assert pid is not None
        models.stop("a")
        os.kill(pid, signal.SIGKILL)
        assert models.sample("b", PROMPTS[:1], max_new_tokens=4) == wanted(workshop, PROMPTS[:1], max_new_tokens=4)
        assert pid_on(models.cores()["b"]) not in (None, pid)
