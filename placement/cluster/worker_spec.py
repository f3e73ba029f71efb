"""Worker specifications of a group: cores, variables, makers, addresses of drafts, and the targets that call them.

Values that are sent to the workers, and functions that make them. Starts no process and takes no core (`deployment`,
`core_allocator`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from paceline.placement.cluster import nodes
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.roles import Settings
from paceline.placement.host import environment
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.plan import Placement
from paceline.placement.planning.planner import cpus_of
from paceline.placement.remote.channel import Address
from paceline.placement.remote.drafter import DrafterContract, DraftTimeouts

_NAME_LETTERS = 16  # of a draft's name in the name of its socket; the whole path may have about a hundred bytes


@dataclass(frozen=True, slots=True)
class DrafterLink:
    """Target's connection to its drafter.

    actor, node        the drafter's actor and node
    startup_timeout_s  seconds the drafter may take to load and compile before it can be called
    """

    contract: DrafterContract
    timeouts: DraftTimeouts
    actor: str
    node: str
    startup_timeout_s: float


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Specification of one worker: its cores on its node, its environment, and what to make.

    actor     name of its Ray actor
    affinity  CPUs of the instance it may use, first and last; ``vcpus`` counts all CPUs of the instance
    address   where the drafter listens: own address of a draft, draft's address for a target; None: target without a
    draft
    link      for a target with a draft
    """

    actor: str
    label: str
    node: str
    cores: CoreRange
    env: tuple[tuple[str, str], ...]
    affinity: tuple[int, int]
    vcpus: int
    maker: str
    settings: Settings
    secret: bytes = field(repr=False)
    address: Address | None = None
    link: DrafterLink | None = None


@dataclass(frozen=True, slots=True)
class Location:
    """Location of a worker: its actor's name, its node, and its cores on that node."""

    actor: str
    node: str
    cores: CoreRange


def worker_specs(
    instance: Instance, placements: Sequence[Placement], fault_policy: FaultPolicy, *, locations: Mapping[str, Location]
) -> dict[str, WorkerSpec]:
    """Return label -> specification, for workers that start together. ``locations``: one for every label."""
    secret, addresses = secrets.token_bytes(32), _addresses(placements, locations)
    specs = {}
    for item in placements:
        location, env, link = locations[item.label], item.env, None
        if location.cores != item.cores:
            threads = int(dict(env)["OMP_NUM_THREADS"])
            env = environment.planned(instance, location.cores, label=item.label, threads=threads)
        draft = next((one for one in placements if (item.name, item.replica) in one.drafts_for), None)
        if draft is not None:
            contract = DrafterContract(
                num_draft_tokens=draft.model.k,
                slots=item.model.options.slots,
                vocab_size=item.model.config.vocab_size,
                max_positions=draft.model.n_positions,
                target=item.label,
            )
            at, timeouts = locations[draft.label], fault_policy.draft_timeouts
            link = DrafterLink(contract, timeouts, at.actor, at.node, fault_policy.startup_timeout_s)
        specs[item.label] = WorkerSpec(
            actor=location.actor,
            label=item.label,
            node=location.node,
            cores=location.cores,
            env=env,
            affinity=cpus_of(instance, location.cores),
            vcpus=instance.vcpus,
            maker=fault_policy.makers[item.role],
            settings=_settings(item, placements, fault_policy),
            secret=secret,
            address=addresses.get((draft or item).label),
            link=link,
        )
    return specs


def _addresses(placements: Sequence[Placement], locations: Mapping[str, Location]) -> dict[str, Address]:
    """Return the addresses of drafts: a socket file if the target is on the same node, else a port."""
    addresses = {}
    for item in placements:
        if item.role == "draft":
            node = locations[item.label].node
            targets = [target for target in placements if (target.name, target.replica) in item.drafts_for]
            file = environment.scratch() / "sockets" / f"{item.label[:_NAME_LETTERS]}-{secrets.token_hex(4)}"
            on_node = all(locations[target.label].node == node for target in targets)
            addresses[item.label] = Address(path=str(file)) if on_node else nodes.tcp_address(node)
    return addresses


def _settings(item: Placement, placements: Sequence[Placement], fault_policy: FaultPolicy) -> Settings:
    model = item.model
    targets = {str(p.model.folder) for p in placements if (p.name, p.replica) in item.drafts_for}
    options = asdict(replace(model.options, tp_degree=len(item.cores)))
    loading = {"folder": str(model.folder), "draft_ahead": fault_policy.draft_ahead}
    serving = {"targets": sorted(targets)} if item.role == "draft" else {}
    return {**options, **loading, **dict(model.speculative), **serving}
