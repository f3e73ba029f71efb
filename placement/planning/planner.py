"""Planner: from models and an instance to a plan. Pure: nothing is started, read or reserved.

Rules, each with its own error:

- a backend that drives the chip;
- a degree that the runtime accepts;
- K/V heads that can be laid out as asked;
- a shard, padded as in `paceline.decoder.parallel.sharding`, that fits on a core;
- a contiguous run that starts at a multiple of its length;
- every core in one process only.

`check` reports whether an installed backend can run the plan, which may be made from configurations only. See also:
whether cores are free now (`cluster.core_allocator`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.core.errors import ConfigurationError, PlanError, RoomError
from paceline.decoder.backends.registry import BACKENDS, why_not_cached, why_not_quantized
from paceline.decoder.models.config import check_positions
from paceline.decoder.options import MAX_WIDTH
from paceline.decoder.parallel.sharding import layout
from paceline.neuron import chips
from paceline.placement.host import environment
from paceline.placement.planning.core_range import CoreRange, best_fit, fragmentation
from paceline.placement.planning.footprint import Footprint, footprint
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.model_specs import ModelSpec
from paceline.placement.planning.plan import Placement, Plan

_NEURON = ("neuron", "neuron-native")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Need:
    """Process that needs cores."""

    model: ModelSpec
    replica: int
    degree: int
    footprint: Footprint

    @property
    def order(self) -> tuple[int, bool, str, int]:
        """Key for sorting: larger first, targets before drafts; then by name, for a reproducible plan."""
        return -self.degree, bool(self.model.draft_of), self.model.name, self.replica


_HEADROOM = 0.9
"""Share of a core's memory that `auto` fills: footprints are estimates."""
_GAIN = 0.8
"""A larger degree has to bring the time of a token to this share of the smaller one's, or cores are wasted."""


def degrees_of(model: ModelSpec, instance: Instance) -> list[int]:
    """Return the tensor-parallel degrees to place a model with, the preferred one first.

    As given; or with `auto` the one from which on more cores gain little, then smaller ones, for less room.

    Raises:
        PlanError: the degree is illegal, K/V heads do not allow it, or the backend does not drive the chip.
        RoomError: the shard does not fit on a core.
    """
    name = model.name
    chip = chips.chip_of(instance.name)
    if chip and model.options.backend in _NEURON and model.options.backend not in chips.CAPABILITIES[chip].backends:
        able = " or ".join(chips.CAPABILITIES[chip].backends)
        raise PlanError(f"{name}: backend: expected {able} on {instance.name}, got {model.options.backend}; change it")
    legal = [degree for degree in instance.degrees if not _why_not(model, degree)]
    if not legal:
        raise PlanError(
            f"{name}: cannot run at any degree of {instance.name} ({_why_not(model, instance.degrees[0])}); use "
            "another instance or quantization"
        )
    if model.degree is None:
        fits = [d for d in legal if _size(model, d).total <= instance.memory]
        if not fits:
            over = _size(model, legal[-1]).total - instance.memory
            raise RoomError(
                f"{name}: at {legal[-1]}, its highest degree on {instance.name}, each core needs {over} bytes more "
                f"than the {instance.memory} available; lower n_positions or batch_size, quantize the weights, or "
                "use an instance with more memory per core"
            )
        if not BACKENDS[model.options.backend].divided:
            return fits[:1]
        roomy = [d for d in fits if _size(model, d).total <= _HEADROOM * instance.memory] or fits[-1:]
        best = roomy[0]
        for wider in roomy[1:]:
            if token_seconds(model, instance, wider) > _GAIN * token_seconds(model, instance, best):
                break
            best = wider
        return [d for d in reversed(fits) if d <= best]
    if model.degree not in instance.degrees + instance.seldom:
        raise PlanError(
            f"{name}: tp_degree: expected one of {', '.join(map(str, instance.degrees))} on {instance.name}, got "
            f"{model.degree}; use one of them"
        )
    if refused := _why_not(model, model.degree):
        raise PlanError(f"{name}: tp_degree: {refused}; use one of {', '.join(map(str, legal))}")
    over = _size(model, model.degree).total - instance.memory
    if over > 0:
        raise RoomError(
            f"{name}: at tp_degree={model.degree} each core needs {over} bytes more than the {instance.memory} of "
            f"{instance.name}; raise tp_degree, or lower n_positions or batch_size"
        )
    return [model.degree]


def token_seconds(model: ModelSpec, instance: Instance, degree: int) -> float:
    """Estimate a plain step: weights and cache are read, two collectives a layer, one call of the host."""
    size = _size(model, degree)
    read = (size.weights + size.cache) / instance.bandwidth / chips.BANDWIDTH_SHARE.value
    collectives = 2 * (model.config.num_layers + 1) if degree > 1 else 0
    return read + collectives * chips.COLLECTIVE.value + chips.LAUNCH.value


_GRAPHS_OF_ONE, _GRAPHS = 16, 28
"""Graphs of a pair with one slot and with 16, at most, unless lists ask for more."""
_COMPILERS = {"neuron-native": 1}  # others: 4


def compile_seconds(model: ModelSpec) -> float:
    """Return the estimated seconds in which a model's graphs compile; 0 for a backend that compiles none."""
    graphs = _GRAPHS_OF_ONE if model.options.slots == 1 else _GRAPHS
    backend = model.options.backend
    return chips.compile_seconds(graphs, _COMPILERS.get(backend, 4)) if BACKENDS[backend].compiles else 0.0


def why(model: ModelSpec, instance: Instance, degree: int) -> str:
    """Tell why `auto` took this degree; "" if the models file gives one, or the backend has no other."""
    if model.degree is not None or not BACKENDS[model.options.backend].divided:
        return ""
    choices = degrees_of(model, instance)
    legal = [d for d in instance.degrees if not _why_not(model, d)]
    wider, narrower = [d for d in legal if d > degree][:1], [d for d in choices if d < degree][:1]

    def told(d: int) -> str:
        return f"tp {d} about {token_seconds(model, instance, d) * 1e3:.1f} ms per token"

    against = "less than a fifth faster" if degree == choices[0] else "without room"
    found = [told(degree), *(f"{told(d)}, {against}" for d in wider)]
    found += [told(d) for d in narrower]
    size = _size(model, degree).total
    return f"{'; '.join(found)}; {size // _MIB:,} of {instance.memory // _MIB:,} MiB a core"


def settled(models: Sequence[ModelSpec], instance: Instance, *, taken: Sequence[CoreRange] = ()) -> dict[str, int]:
    """Return a degree for each model with which all fit together: the preferred ones, of which the widest are
    narrowed until there is room; the smallest of each if there is none.
    """
    wanted = {model.name: degrees_of(model, instance) for model in models}
    while True:
        degrees = {name: choices[0] for name, choices in wanted.items()}
        try:
            place(_needs(models, instance, degrees), instance, taken)
        except RoomError:
            widest = max((name for name in wanted if wanted[name][1:]), key=degrees.__getitem__, default=None)
            if widest is None:
                return degrees
            wanted[widest] = wanted[widest][1:]
        else:
            return degrees


def plan(models: Sequence[ModelSpec], instance: Instance, *, taken: Sequence[CoreRange] = ()) -> Plan:
    """Place all models on an instance where ``taken`` is in use.

    Raises:
        PlanError: a model cannot be run on the instance; the message names the rule.
        RoomError: the instance has too few cores, or too little memory.
    """
    needs = _needs(models, instance, settled(models, instance, taken=taken))
    assigned = place(needs, instance, taken)
    by_cores = sorted(assigned, key=lambda pair: pair[1])
    share = max(1, instance.vcpus // max(1, len(by_cores)))
    placements = [
        replace(_placement(instance, pair, share=share), drafts_for=_target_of(pair[0], needs)) for pair in by_cores
    ]
    labels = [item.label for item in placements]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise PlanError(
            f"name: expected different names, got {twice!r} for a model and a replica of another; rename one of them"
        )
    return Plan(instance, tuple(placements))


def _needs(models: Sequence[ModelSpec], instance: Instance, degrees: Mapping[str, int]) -> list[Need]:
    """Return the processes of models at these degrees, in the order in which they are placed."""
    needs = []
    for model in models:
        degree = degrees[model.name]
        if model.replicas * degree > instance.cores:
            raise RoomError(
                f"{model.name}: replicas: expected at most {instance.cores // degree} of {degree} cores each on "
                f"{instance.name} ({instance.cores} cores), got {model.replicas}; lower replicas, or use a larger "
                "instance"
            )
        size = _size(model, degree)
        needs += [Need(model, replica, degree, size) for replica in range(model.replicas)]
    return sorted(needs, key=lambda need: need.order)


def place(needs: Sequence[Need], instance: Instance, taken: Sequence[CoreRange]) -> list[tuple[Need, CoreRange]]:
    """Assign a range to every need; larger ones come first."""
    assigned: list[tuple[Need, CoreRange]] = []
    for need in needs:
        used = [*taken, *(cores for _, cores in assigned)]
        partner = next(
            (cores for other, cores in assigned if (other.model.name, other.replica) in _target_of(need, needs)),
            None,
        )
        run = best_fit(instance, used, need.degree, near=partner)
        if run is None:
            raise RoomError(_no_room(need, needs, instance, used=used))
        assigned.append((need, run))
    return assigned


def _why_not(model: ModelSpec, degree: int) -> str:
    """Return why a model cannot be sharded over ``degree`` cores, with its K/V heads as configured; "" if it can."""
    try:
        layout(model.config, degree, model.options.group_query_attention)
    except ConfigurationError as error:
        return str(error)
    return ""


def _size(model: ModelSpec, degree: int) -> Footprint:
    own = footprint(model.config, model.options, degree)
    drafts = [draft.footprint(model.config, model.options, degree) for draft in model.drafts]
    weights, cache = sum(size.weights for size in drafts), sum(size.cache for size in drafts)
    return replace(own, weights=own.weights + weights, cache=own.cache + cache)


def _target_of(draft: Need, needs: Sequence[Need]) -> tuple[tuple[str, int], ...]:
    names = draft.model.draft_of
    targets = sorted((need.model.name, need.replica) for need in needs if need.model.name in names)
    return tuple(targets[draft.replica : draft.replica + 1])


def _no_room(need: Need, needs: Sequence[Need], instance: Instance, *, used: Sequence[CoreRange]) -> str:
    left = fragmentation(instance, used)
    needed = sum(need.degree for need in needs)
    label = f"{need.model.name} (replica {need.replica})" if need.model.replicas > 1 else need.model.name
    if left.free < need.degree:
        return (
            f"{label} wants {need.degree} cores and {left.free} of {instance.cores} on {instance.name} are free "
            f"({needed} wanted in all); ask for less, or take a larger instance{_instead(need, needs, instance)}"
        )
    return (
        f"{label}: {left.free} cores free but no aligned run of {need.degree} on {instance.name} (the longest free run "
        f"is {left.largest}); stop or move what breaks it up, or use tp_degree={left.largest}"
    )


def _instead(draft: Need, needs: Sequence[Need], instance: Instance) -> str:
    """Suggest what gives a draft room: the target's own process, or 8-bit weights of the target on fewer cores."""
    target = next((need for need in needs if need.model.name in draft.model.draft_of), None)
    if target is None:
        return ""
    found, model = "", target.model
    size = footprint(draft.model.config, draft.model.options, target.degree)
    inside = target.footprint.total + size.weights + size.cache
    if inside <= instance.memory:
        found += (
            f"; or load it in the process of {model.name} (`draft: {{path: ...}}` there instead of draft_of: "
            f"{inside // _MIB:,} of {instance.memory // _MIB:,} MiB a core)"
        )
    for degree in reversed(instance.degrees):
        narrow = replace(model, options=replace(model.options, quantization="int8"))
        room = degree <= instance.cores - draft.degree and not _why_not(model, degree)
        if room and _size(narrow, degree).total <= instance.memory:
            return f"{found}; or load {model.name} with `quantization: int8` at tp_degree={degree}"
    return found


def cpus_of(instance: Instance, cores: CoreRange) -> tuple[int, int]:
    """Return the first and last CPU of the host for a process on these cores: an exclusive share, whatever the plan of
    other processes. Without an accelerator cores are only counted, and a process may use every CPU.
    """
    if not instance.sdk:
        return 0, instance.vcpus - 1
    first = cores.first * instance.vcpus // instance.cores
    return first, max(first, (cores.last + 1) * instance.vcpus // instance.cores - 1)


def _placement(instance: Instance, assigned: tuple[Need, CoreRange], *, share: int) -> Placement:
    """Return the placement of a need. ``share``: threads of a process if CPUs are not divided by cores."""
    need, cores = assigned
    label = need.model.name if not need.replica else f"{need.model.name}.{need.replica}"
    first, last = cpus_of(instance, cores)
    threads = last - first + 1 if instance.sdk else share
    env = environment.planned(instance, cores, label=label, threads=threads)
    because = why(need.model, instance, need.degree)
    return Placement(need.model, need.replica, cores, need.footprint, env, (first, last), why=because)


def check(plan: Plan) -> None:
    """Raise PlanError for the first model that cannot be loaded as it was planned."""
    for item in plan.placements:
        model, degree = item.model, len(item.cores)
        if model.folder is None:
            raise PlanError(f"{item.name}: expected `path` to run it, got only a configuration; give `path`")
        if model.n_positions > model.config.max_position_embeddings:
            raise PlanError(
                f"{item.name}: n_positions: expected at most {model.config.max_position_embeddings}, which it was "
                f"trained on (max_position_embeddings), got {model.n_positions}; lower it"
            )
        try:
            check_positions(model.config.rope, model.n_positions)
        except ConfigurationError as error:
            raise PlanError(f"{item.name}: {error}") from error
        if (item.role == "draft" or model.speculative.draft) and model.k >= MAX_WIDTH:
            raise PlanError(
                f"{item.name}: k: expected at most {MAX_WIDTH - 1} draft tokens per round, got {model.k}; lower it"
            )
        options = model.options
        row = BACKENDS[options.backend]
        if reason := why_not_quantized(row, options.quantization) or why_not_cached(row, options.kv_cache_dtype):
            raise PlanError(f"{item.name}: {reason}; correct it")
        if degree > 1 and not row.divided:
            able = ", ".join(row.name for row in BACKENDS.values() if row.divided)
            raise PlanError(
                f"{item.name}: tp_degree: expected 1 for backend={options.backend!r}, got {degree}; set `tp_degree: "
                f"1`, or use a backend with tensor parallelism: {able}"
            )
