"""The planner: its rules on every instance type, the best packing by comparison with brute force, and its refusals."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import PlanError
from paceline.decoder.options import LoadOptions
from paceline.decoder.parallel.sharding import GQA, Shard, layout
from paceline.placement import INSTANCES, FaultPolicy, Instance, Plan, plan
from paceline.placement.planning.core_range import CoreRange, best_fit, fragmentation, free_runs
from paceline.placement.planning.footprint import footprint
from paceline.placement.planning.groups import plan_groups
from paceline.placement.planning.instances import instance
from paceline.placement.planning.model_specs import ModelSpec
from paceline.placement.planning.planner import cpus_of, degrees_of, token_seconds
from tests.placement.wishes import config, model

LARGE = INSTANCES["inf2.48xlarge"]


def check(made: Plan, taken: tuple[CoreRange, ...] = ()) -> None:
    """Everything a plan promises."""
    used = [core for item in (*taken, *(p.cores for p in made.placements)) for core in item.cores]
    assert len(used) == len(set(used)) and set(used) <= set(range(made.instance.cores))
    ports = set()
    for item in made.placements:
        cores, env = item.cores, dict(item.env)
        assert len(cores) in made.instance.degrees and cores.first % len(cores) == 0
        assert item.model.config.num_heads % len(cores) == 0
        assert item.footprint.total <= made.instance.memory
        assert env["PACELINE_CORES"] == str(cores)
        assert env.get("NEURON_RT_VISIBLE_CORES", str(cores)) == str(cores)
        assert 0 <= item.affinity[0] <= item.affinity[1] < made.instance.vcpus
        assert ("NEURON_RT_ROOT_COMM_ID" in env) == (len(cores) > 1)
        ports.add(env.get("NEURON_RT_ROOT_COMM_ID", item.label))
    assert len(ports) == len(made.placements)


@pytest.mark.parametrize("name", INSTANCES)
@settings(max_examples=15)
@given(dice=st.randoms(use_true_random=False))
def test_a_plan_keeps_every_rule_or_there_is_none(name: str, dice: random.Random) -> None:
    machine = instance(name)
    degrees = [dice.choice(machine.degrees) for _ in range(dice.randint(1, 10))]
    models = [model(f"m{i}", degree) for i, degree in enumerate(degrees)]
    taken = tuple(CoreRange(core, core) for core in range(machine.cores) if dice.random() < 0.1)
    try:
        made = plan(models, machine, taken=taken)
    except PlanError as error:
        assert "free" in str(error)
        return
    check(made, taken)
    assert sorted(len(p.cores) for p in made.placements) == sorted(degrees)
    dice.shuffle(models)
    assert plan(models, machine, taken=taken) == made  # the order of the file does not matter


def test_processes_on_different_cores_have_different_cpus() -> None:
    runs = [CoreRange(first, first + 3) for first in range(0, LARGE.cores, 4)]
    cpus = [set(range(first, last + 1)) for first, last in (cpus_of(LARGE, run) for run in runs)]
    assert sum(map(len, cpus)) == len(set().union(*cpus)) == LARGE.vcpus


def test_successive_plans_share_no_port() -> None:
    (first,) = plan([model("a", 8)], LARGE).placements
    (second,) = plan([model("b", 8)], LARGE, taken=[first.cores]).placements
    assert dict(first.env)["NEURON_RT_ROOT_COMM_ID"] != dict(second.env)["NEURON_RT_ROOT_COMM_ID"]


def best_by_force(machine: Instance, taken: tuple[CoreRange, ...], degrees: list[int]) -> tuple[int, ...] | None:
    """The best of all packings: the most free runs left, longest first; None if there is no packing."""
    best: tuple[int, ...] | None = None
    reached: set[tuple[int, frozenset[CoreRange]]] = set()
    stack = [(0, frozenset(taken))]
    order = sorted(degrees, reverse=True)
    while stack:
        depth, used = stack.pop()
        if depth == len(order):
            left = tuple(count for _, count in fragmentation(machine, sorted(used)).runs)
            best = left if best is None else max(best, left)
            continue
        for run in free_runs(machine, sorted(used), order[depth]):
            state = (depth + 1, used | {run})
            if state not in reached:
                reached.add(state)
                stack.append(state)
    return best


def test_the_packing_is_the_best() -> None:
    dice, found, none = random.Random(5), 0, 0
    for _ in range(150):
        machine = INSTANCES[dice.choice(("inf2.24xlarge", "inf2.24xlarge", "inf2.xlarge", "trn2.3xlarge"))]
        degrees = [min(dice.choice(machine.degrees) for _ in range(2)) for _ in range(dice.randint(1, 8))]
        taken = tuple(CoreRange(core, core) for core in range(machine.cores) if dice.random() < 0.15)
        wanted = best_by_force(machine, taken, degrees)
        try:
            made = plan([model(f"m{i}", d) for i, d in enumerate(degrees)], machine, taken=taken)
        except PlanError:
            assert wanted is None
            none += 1
            continue
        found += 1
        used = [*taken, *(p.cores for p in made.placements)]
        assert tuple(count for _, count in fragmentation(machine, used).runs) == wanted
    assert found > 40 and none > 20


def test_eight_models_fill_an_instance_when_they_can() -> None:
    for degrees in ([8, 4, 2, 2, 1, 1, 1, 1], [8, 8, 2, 2, 1, 1, 1, 1], [4, 4, 4, 4, 4, 2, 1, 1], [8, 8, 8]):
        for order in itertools.islice(itertools.permutations(degrees), 0, 4000, 997):
            made = plan([model(f"m{i}", d) for i, d in enumerate(order)], LARGE)
            check(made)
            assert made.fragmentation.free == 24 - sum(degrees)
    check(plan([model(f"m{i}", 1) for i in range(24)], LARGE))


def test_free_cores_stay_contiguous() -> None:
    taken = [CoreRange(0, 7), CoreRange(8, 9)]
    assert best_fit(LARGE, taken, 2) == CoreRange(10, 11)
    assert best_fit(LARGE, [*taken, CoreRange(16, 16)], 1) == CoreRange(17, 17)
    assert fragmentation(LARGE, taken).largest == 8
    assert fragmentation(LARGE, [CoreRange(c, c) for c in (0, 8, 16)]).largest == 4
    left = fragmentation(LARGE, [CoreRange(c, c) for c in (0, 8, 16)])
    assert (left.free, dict(left.runs)[4], round(left.stranded, 3)) == (21, 3, round(1 - 12 / 21, 3))


def test_a_draft_is_adjacent_to_its_target_if_possible() -> None:
    targets = [model("a", 8), model("b", 8)]
    made = plan([*targets, model("db", 2, draft_of=("b",))], LARGE, taken=[CoreRange(16, 17), CoreRange(22, 23)])
    cores = {item.name: item.cores for item in made.placements}
    assert cores == {"a": CoreRange(0, 7), "b": CoreRange(8, 15), "db": CoreRange(18, 19)}


def test_every_replica_of_a_target_has_its_own_draft() -> None:
    own = plan([model("t", 4, replicas=3), model("d", 1, draft_of=("t",), replicas=3)], LARGE)
    assert {p.label: p.drafts_for for p in own.placements if p.drafts_for} == {
        "d": (("t", 0),), "d.1": (("t", 1),), "d.2": (("t", 2),),
    }  # fmt: skip
    both = plan([model("a", 4, replicas=2), model("b", 4), model("d", 1, draft_of=("a", "b"), replicas=3)], LARGE)
    assert [p.drafts_for for p in both.placements if p.drafts_for] == [(("a", 0),), (("a", 1),), (("b", 0),)]


EIGHT = config(heads=32, layers=32, hidden=4096, vocab=128256, kv=8)


def test_auto_adds_cores_while_tokens_get_faster_and_others_fit() -> None:
    big = model("big", None, of=EIGHT, backend="neuron")
    assert footprint(EIGHT, big.options, 1).total <= LARGE.memory, "it fits on one core, which is slow"
    times = {d: token_seconds(big, LARGE, d) for d in LARGE.degrees}
    wanted = degrees_of(big, LARGE)
    assert wanted == [24, 8, 4, 2, 1] and times[24] < 0.8 * times[8] < 0.64 * times[4]
    assert [len(p.cores) for p in plan([big], LARGE).placements] == [24]
    draft = model("draft", 2, draft_of=("big",))
    assert {p.name: len(p.cores) for p in plan([big, draft], LARGE).placements} == {"big": 8, "draft": 2}
    small = model("small", None, backend="neuron")
    assert degrees_of(small, LARGE) == [1], "a small model is not worth a second core"
    assert degrees_of(model("big", None, of=EIGHT), LARGE) == [1], "native runs a model on one"
    groups = plan_groups([big, draft, model("other", None, of=EIGHT, backend="neuron")], LARGE)
    assert [group.num_cores for group in groups] == [(8, 2), (8,)], "groups are made for one machine"


def test_auto_says_why() -> None:
    big, draft = model("big", None, of=EIGHT, backend="neuron"), model("draft", 2, draft_of=("big",))
    alone, fixed = plan([big], LARGE).placements[0].why, plan([big, draft], LARGE).placements
    assert alone.startswith("tp 24 about ") and "; tp 8 about " in alone and " of 16,384 MiB a core" in alone
    (narrowed,) = (one.why for one in fixed if one.name == "big")
    assert narrowed.startswith("tp 8 about ") and "tp 24 about" in narrowed and "without room" in narrowed
    small = plan([model("small", None, backend="neuron")], LARGE).placements[0].why
    assert small.startswith("tp 1 about ") and "less than a fifth faster" in small
    assert [one.why for one in fixed if one.name == "draft"] == [""], "the file gives the degree"


def test_a_degree_that_one_document_names_is_taken_only_if_asked_for() -> None:
    wide = config(heads=48, layers=2, hidden=768, vocab=96, kv=12)
    assert [len(p.cores) for p in plan([model("m", 12, of=wide)], LARGE).placements] == [12]
    assert 12 not in degrees_of(model("m", None, of=wide, backend="neuron"), LARGE)
    with pytest.raises(PlanError, match=r"tp_degree: expected one of 1, 2, 8, 16, 32 on trn1\.32xlarge, got 4"):
        plan([model("m", 4, of=wide)], INSTANCES["trn1.32xlarge"])


def test_a_start_may_take_as_long_as_its_graphs_are_estimated_to_compile() -> None:
    def seconds(backend: str, slots: int) -> float:
        one = model("m", 1, backend=backend)
        batched = replace(one, options=replace(one.options, batch_size=slots))
        return FaultPolicy().for_models([batched]).startup_timeout_s

    assert seconds("native", 16) == FaultPolicy().startup_timeout_s == 600
    assert seconds("neuron", 1) == 2 * 4 * 300 and seconds("neuron", 16) == 2 * 7 * 300


def test_auto_leaves_headroom_where_it_can() -> None:
    machine = replace(LARGE, memory=footprint(EIGHT, LoadOptions(n_positions=128), 1).total + 1)
    full = model("full", None, of=EIGHT, backend="neuron")
    assert degrees_of(full, replace(machine, devices=1, degrees=(1, 2)))[0] == 2


def test_a_backend_must_support_the_chip() -> None:
    def on(backend: str) -> ModelSpec:
        return model("m", 1, backend=backend)

    for name, good, bad in (
        ("inf2.xlarge", "neuron", "neuron-native"),
        ("trn1.2xlarge", "neuron", "neuron-native"),
        ("trn3.gen1", "neuron-native", "neuron"),
    ):
        plan([on(good)], instance(name))
        with pytest.raises(PlanError, match=f"m: backend: expected {good} on {name}, got {bad}; change it"):
            plan([on(bad)], instance(name))
    for backend in ("neuron", "neuron-native"):
        plan([on(backend)], instance("trn2.48xlarge"))


def test_a_pair_that_does_not_fit_names_what_fits() -> None:
    seventy = config(heads=64, layers=80, hidden=8192, vocab=128256, kv=8)
    models = [model("large", 24, of=seventy), model("draft", 8, of=EIGHT, draft_of=("large",))]
    with pytest.raises(
        PlanError, match=r"in the process of large .*MiB a core\); .*quantization: int8` at tp_degree=8"
    ):
        plan(models, LARGE)


def test_a_footprint_counts_weights_and_caches() -> None:
    one = config(heads=4, layers=2, hidden=96, vocab=64, kv=2)
    products = 2 * (96 * (4 * 8 * 2 + 2 * 8 * 2) + 3 * 96 * 192)
    whole = footprint(one, LoadOptions(n_positions=128), 1)
    assert whole.weights == 2 * (products + 2 * 64 * 96 + (2 * 2 + 1) * 96)
    assert whole.cache == 2 * 2 * 2 * 8 * (128 + 256) * 2
    assert footprint(one, LoadOptions(amp="f32", n_positions=128), 1).weights == 2 * whole.weights
    assert footprint(one, LoadOptions(batch_size=3, n_positions=128), 1).cache == 3 * whole.cache
    for form, size in (("int8", 1.01), ("q4_0", 18 / 32)):
        packed = footprint(one, LoadOptions(quantization=form, n_positions=128), 1).weights
        assert packed == ceil(size * (products + 2 * 64 * 96) + 2 * (2 * 2 + 1) * 96)
    halves = [footprint(one, LoadOptions(n_positions=128), d).cache for d in (1, 2, 4)]
    assert halves == [whole.cache, whole.cache // 2, whole.cache // 2]  # two key heads cannot be cut in four


@pytest.mark.parametrize("gqa", [None, GQA.ALL_GATHER_HEADS])
def test_a_footprint_counts_padded_heads(gqa: GQA | None) -> None:
    """40 query heads share 10 K/V heads: four ranks cannot have whole ones, and each query head gets its own copy."""
    odd = config(heads=40, layers=2, hidden=320, vocab=64, kv=10)
    asked = LoadOptions(n_positions=128, group_query_attention=gqa)
    whole, four = (footprint(odd, asked, degree) for degree in (1, 4))
    shards = [Shard(odd, layout(odd, 4, gqa), rank) for rank in range(4)]
    assert max(len(shard.key_heads) for shard in shards) == 10 and four.cache == whole.cache
    read = odd.num_layers * odd.hidden_size * 2 * (2 * shards[0].key_part)  # of keys and values, bytes
    assert four.weights >= read and (gqa is None) == (shards[0].key_part == 10 * odd.head_dim)


@pytest.mark.parametrize(
    ("models", "on", "says"),
    [
        ([model("m", 16)], "inf2.48xlarge", "on inf2.48xlarge, got 16"),
        ([model("m", 4)], "trn1.32xlarge", "got 4"),
        ([model("m", 2)], "trn2.3xlarge", "got 2"),
        ([model("m", 1, of=config(layers=80, hidden=8192, heads=64))], "inf2.48xlarge", "bytes more than the"),
        ([model("m", None, of=config(layers=900, hidden=32768, heads=64))], "inf2.48xlarge", "its highest degree on"),
        ([model("a", 8), model("b", 8), model("c", 8), model("d", 1)], "inf2.48xlarge", "0 of 24"),
        ([model("m", 1, of=config(layers=40, hidden=4096))], "cpu", "bytes more than the"),
    ],
)
def test_a_refusal_names_its_rule(models: list, on: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        plan(models, instance(on))


def test_a_refusal_tells_fragmentation_from_fullness() -> None:
    taken = [CoreRange(c, c + 4) for c in (0, 8, 16)]
    with pytest.raises(PlanError, match=r"m: 9 cores free but no aligned run of 8 .*longest free run is 2"):
        plan([model("m", 8)], LARGE, taken=taken)


def test_an_8_bit_cache_counts_one_byte_per_number_and_one_scale_per_row() -> None:
    shape, sizes = LoadOptions(batch_size=2, n_positions=1024), config()
    wide, narrow = (footprint(sizes, replace(shape, kv_cache_dtype=form), 1) for form in (None, "int8"))
    assert narrow.cache * 2 * sizes.head_dim == wide.cache * (sizes.head_dim + 4)
    assert narrow.weights == wide.weights and narrow.scratch == wide.scratch
    eight, floats = (footprint(sizes, replace(shape, quantization=form), 1) for form in ("int8", "fp8_e4m3"))
    assert eight == floats and 0.5 < eight.weights / wide.weights < 0.51
