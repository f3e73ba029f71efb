"""What each worker of a group is told: its variables, what it makes, where drafts listen and who calls them.

Nothing is started here and no core is taken (`group`, `ledger`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from paceline.placement.cluster import nodes
from paceline.placement.cluster.actors import Link, WorkerSpec
from paceline.placement.cluster.core_allocator import worker_name
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.roles import Settings
from paceline.placement.host import environment, private_dir
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.plan import Placement
from paceline.placement.remote.channel import Address
from paceline.placement.remote.drafter import DrafterContract

_SHOWN = 16  # letters of a draft's name in that of its socket, whose whole path has room for some hundred bytes


def assignments(
    instance: Instance,
    placements: Sequence[Placement],
    care: FaultPolicy,
    *,
    where: Sequence[str],
    claims: Sequence[str],
    cores: Mapping[str, CoreRange],
) -> dict[str, WorkerSpec]:
    """Label -> assignment. ``where`` and ``claims``: node and claim of each placement; ``cores``: of each claim."""
    secret, addresses, found = secrets.token_bytes(32), _addresses(placements, where), {}
    names = {item.label: item.name for item in placements}
    for item, node, claim in zip(placements, where, claims, strict=True):
        own = item if item.role == "draft" else draft_of(item, placements)
        found[item.label] = WorkerSpec(
            actor=worker_name(claim, node, cores[claim]),
            label=item.label,
            node=node,
            cores=cores[claim],
            env=variables(instance, item, cores[claim]),
            affinity=item.affinity,
            vcpus=instance.vcpus,
            maker=care.makers[item.role],
            settings=_settings(item, placements, care),
            secret=secret,
            quota=item.model.quota.by_label(names),
            address=None if own is None else addresses[own.label],
        )
    return found


def variables(instance: Instance, item: Placement, cores: CoreRange) -> tuple[tuple[str, str], ...]:
    """The plan's, or the same for the range that was free instead."""
    if cores == item.cores:
        return item.env
    threads = int(dict(item.env)["OMP_NUM_THREADS"])
    return environment.planned(instance, cores, label=item.label, threads=threads, timeout=item.timeout)


def draft_of(item: Placement, placements: Sequence[Placement]) -> Placement | None:
    """The draft of a target, if it has one."""
    return next((p for p in placements if (item.name, item.replica) in p.drafts_for), None)


def link(
    item: Placement, placements: Sequence[Placement], care: FaultPolicy, *, assigned: Mapping[str, WorkerSpec]
) -> Link | None:
    """How a target calls its draft; None for one without."""
    draft = draft_of(item, placements)
    if draft is None:
        return None
    model, reach = item.model, draft.model.shape.n_positions
    terms = DrafterContract(draft.model.k, model.shape.batch_size, model.config.vocab_size, reach, item.label)
    given = assigned[draft.label]
    return Link(terms, care.draft_timeouts, given.actor, given.node, care.startup_timeout_s)


def _addresses(placements: Sequence[Placement], where: Sequence[str]) -> dict[str, Address]:
    """Where drafts listen: a socket file if all who call are on the same node, else a port."""
    nodes_of = {item.label: node for item, node in zip(placements, where, strict=True)}
    found = {}
    for item in placements:
        if item.role == "draft":
            here = nodes_of[item.label]
            callers = [p for p in placements if (p.name, p.replica) in item.drafts_for]
            file = private_dir.scratch() / "sockets" / f"{item.label[:_SHOWN]}-{secrets.token_hex(4)}"
            near = all(nodes_of[caller.label] == here for caller in callers)
            found[item.label] = Address(path=str(file)) if near else nodes.tcp_address(here)
    return found


def _settings(item: Placement, placements: Sequence[Placement], care: FaultPolicy) -> Settings:
    model = item.model
    sizes = {p.model.config.vocab_size for p in placements if (p.name, p.replica) in item.drafts_for}
    gqa = None if model.gqa is None else model.gqa.value
    ranks = {"tp_degree": len(item.cores), "group_query_attention": gqa}
    given = {"folder": str(model.folder), "backend": model.backend, "k": model.k, "ahead": care.draft_ahead}
    called = {"clients": model.clients, "vocab_sizes": sorted(sizes)} if item.role == "draft" else {}
    return {**asdict(model.shape), **ranks, **given, **called}
