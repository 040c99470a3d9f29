"""The search against an enumeration of the same space that cuts nothing off, and the space itself."""

import itertools
import math
from dataclasses import replace

import pytest
from rlcore_plugin_plan import memory
from rlcore_plugin_plan.generation import generate_seconds, send_seconds, transition_seconds
from rlcore_plugin_plan.inference import forward_seconds
from rlcore_plugin_plan.options import UNITS
from rlcore_plugin_plan.problem import Devices, Fixed
from rlcore_plugin_plan.profile import load
from rlcore_plugin_plan.search import partitions, search
from rlcore_plugin_plan.training import update_seconds
from rlcore_plugin_plan.workload import Lengths

from rlcore.engine import Layout
from rlcore.engine.weights.generation import GenerationLayout
from rlcore.errors import ConfigError
from rlcore.roles.pools import ROLLOUT


def brute_force(problem, *, exact_sizes=False):
    """Return the least seconds (or dollars) of each placement, by looking at everything."""
    found = {}
    for sets in partitions(problem.roles):
        if any(ROLLOUT in roles and len(roles) > 1 for roles in sets):
            continue
        kinds = [(kind, n) for kind, each in enumerate(problem.devices) for n in each.allocations]
        for places in itertools.product(kinds, repeat=len(sets)):
            used = [sum(n for k, n in places if k == kind) for kind in range(len(problem.devices))]
            if any(n > each.count for n, each in zip(used, problem.devices, strict=True)):
                continue
            pools = [every_pool(problem, roles, kind, n) for roles, (kind, n) in zip(sets, places, strict=True)]
            price = sum(problem.devices[k].profile.dollars * n for k, n in places) / 3600
            for stages in itertools.product(*pools):
                seconds = problem.seconds(tuple(map(max, zip(*stages, strict=True))))
                value = seconds * price if problem.objective == "cost" else seconds
                key = tuple(sorted(sets))
                found[key] = min(found.get(key, math.inf), value)
    return found


SEEN = {}


def every_pool(problem, roles, kind, count):
    """Return the stages of every combination of layouts of some roles that fits."""
    key = id(problem), roles, kind, count
    if key not in SEEN:
        layouts = [list(every_role(problem, role, kind, count)) for role in roles]
        fits = [pool_stages(problem, kind, parts) for parts in itertools.product(*layouts)]
        SEEN[key] = problem, list(dict.fromkeys(stages for stages in fits if stages is not None))
    return SEEN[key][1]


def every_role(problem, role, kind, count):
    size, machine = problem.sizes[role], problem.devices[kind].profile.per_machine
    calls = problem.calls(role)
    samples = any(call.method == "generate" for call in calls)
    for pp, tp in itertools.product(range(1, count + 1), (1, 2, 4, 8)):
        if count % (pp * tp) or tp > machine or pp > size.layers or (role == ROLLOUT and pp > 1):
            continue
        layout = Layout(pp, tp, count // (pp * tp))
        if size.shape.problem(layout):
            continue
        shards = [t for t in (1, 2, 4, 8) if tp % t == 0] if samples else [0]
        for t in [tp] if role == ROLLOUT else shards:
            yield role, layout, GenerationLayout(layout, tp=t) if t else None


def pool_stages(problem, kind, parts):
    profile, work = problem.devices[kind].profile, problem.work
    unit = profile.memory * profile.usable / UNITS
    resident = generating = working = 0
    for role, layout, replicas in parts:
        if role != ROLLOUT:
            own = tuple(call for call in problem.calls(role) if call.method != "generate")
            held = memory.role_held(problem.sizes[role], layout, role in problem.trains, own, work)
            resident += math.ceil(held.resident / unit)
            working = max(working, math.ceil(held.working / unit))
        if replicas is not None:
            generating += math.ceil(
                memory.generating_bytes(problem.sizes[role], replicas, work, apart=role == ROLLOUT) / unit
            )
    if resident + generating + working > UNITS:
        return None
    total = [0.0] * len(problem.stage_names)
    for role, layout, replicas in parts:
        size = problem.sizes[role]
        for number, calls in enumerate(problem.dataflow.stages):
            for call in (call for call in calls if call.role == role):
                entry = 0 if role == ROLLOUT else number + bool(problem.ahead)
                total[entry] += profile.call_seconds
                if call.method == "update":
                    total[entry] += update_seconds(size, layout, call, work, profile)
                elif call.method == "generate":
                    free = (UNITS - generating - (0 if work.offload else resident)) * unit
                    slots = math.floor(free / memory.cache_bytes(size, replicas, work))
                    slots = min(slots, math.ceil(work.rows(call) / replicas.replicas))
                    if slots < 1:
                        return None
                    total[entry] += generate_seconds(size, replicas, call, work, slots, profile)
                    if role == ROLLOUT:
                        total[entry] += send_seconds(size, layout, layout.world_size, work, profile)
                    else:
                        total[entry] += transition_seconds(size, replicas, work, profile)
                else:
                    total[entry] += forward_seconds(size, layout, call, work, profile)
    return tuple(total)


def assert_same(problem):
    plans, everything = search(problem), brute_force(problem)
    assert {plan.placement for plan in plans} == set(everything)
    for plan in plans:
        assert plan.objective == pytest.approx(everything[plan.placement], rel=1e-9), plan.placement
    assert plans == sorted(plans, key=lambda plan: plan.objective)


def test_three_models_where_all_fit_and_where_memory_decides(small):
    problem = small(4, roles=3)
    assert_same(problem)
    tight = small(4, memory=2.4e9, roles=3)
    assert len(search(tight)) < len(search(problem))
    assert_same(tight)


def test_four_models(small):
    assert_same(small(4, memory=2.4e9, micro_batch_tokens=2048))


def test_the_cheapest(small):
    problem = replace(small(4, roles=3), objective="cost")
    assert_same(problem)
    dear = replace(problem.devices[0].profile, dollars=1000 * problem.devices[0].profile.dollars)
    both = replace(problem, devices=(Devices(dear, 4), *problem.devices))
    assert all(pool.kind == 1 for pool in search(both)[0].pools)
    assert search(both)[0].objective == pytest.approx(search(problem)[0].objective)


def test_two_kinds_of_devices(small):
    problem = small(4, roles=3)
    fast = replace(load("h100"), memory=4e9, per_machine=2)
    both = replace(problem, devices=(*problem.devices, Devices(fast, 2)))
    assert_same(both)
    assert search(both)[0].seconds < search(problem)[0].seconds


def test_rollouts_ahead(small):
    problem = small(4, roles=3).sampled_apart("actor")
    assert problem.stage_names == ["sampling ahead", "generation", "preparation", "training"]
    assert_same(problem)
    best = search(problem)[0]
    assert best.seconds == max(best.stages[0], sum(best.stages[1:]))
    assert any([part.role for part in pool.parts] == [ROLLOUT] for pool in best.pools)


def test_placements_are_set_partitions():
    for roles, bell in ((1, 1), (2, 2), (3, 5), (4, 15), (5, 52)):
        found = {frozenset(map(frozenset, sets)) for sets in partitions([str(number) for number in range(roles)])}
        assert len(found) == bell
        assert all(sum(map(len, sets)) == roles for sets in found)


def test_allocations():
    a100 = load("a100-80g")
    assert Devices(a100, 40).allocations == [1, 2, 4, 8, 16, 24, 32, 40]
    assert Devices(a100, 6).allocations == [1, 2, 4]
    assert Devices(a100, 24).at_most(23) == 16
    assert Devices(a100, 24).at_most(0) == 0


def test_a_role_that_follows_has_its_leaders_layout_on_one_pool(small):
    problem = replace(small(8, roles=3), leaders={"ref": "actor"})
    for plan in search(problem):
        for pool in plan.pools:
            layouts = {part.role: part.layout for part in pool.parts}
            if {"actor", "ref"} <= set(layouts):
                assert layouts["actor"] == layouts["ref"]


def test_what_is_fixed_is_kept(small):
    pools = {frozenset({"actor", "ref"}): 4, frozenset({"critic"}): None}
    fixed = Fixed(pools, {"actor": (2, 2)}, {"actor": 2})
    (plan,) = search(replace(small(8, roles=3), fixed=fixed))
    counts = {frozenset(part.role for part in pool.parts): pool.count for pool in plan.pools}
    assert counts[frozenset({"actor", "ref"})] == 4
    (actor,) = [part for pool in plan.pools for part in pool.parts if part.role == "actor"]
    assert (actor.layout, actor.generation.tp) == (Layout(2, 2, 1), 2)


def test_offload_leaves_room_for_keys_and_values(small):
    problem = small(4, memory=1.6e9, roles=2, micro_batch_tokens=2048)
    (kept,) = [plan for plan in search(problem) if len(plan.pools) == 1]
    away = replace(problem, work=replace(problem.work, offload=True))
    (parked,) = [plan for plan in search(away) if len(plan.pools) == 1]
    assert parked.stages[0] < kept.stages[0]


def test_uneven_lengths_take_as_long_as_the_longest_and_less_than_all_of_it(small):
    def sampling(*responses):
        problem = small(4, roles=1)
        lengths = Lengths(1024, responses)
        return search(replace(problem, work=replace(problem.work, lengths=lengths)))[0].stages[0]

    assert sampling(256) < sampling(256, 256, 256, 1024) < sampling(1024)


def test_what_does_not_fit_is_said_with_a_change_that_fits(small):
    settings = {"memory": 0.9e9, "roles": 2, "micro_batch_tokens": 2048}
    with pytest.raises(ConfigError, match="no placement of actor, critic fits on 4 a100-80g") as error:
        search(small(4, **settings))
    text = str(error.value)
    # 16 bytes of both models' parameters, the gathered weights and gradients of one, a row's activations and logits.
    assert "actor with critic: 1.1 GB on each of 4 a100-80g, of which 0.8 GB are usable: 0.3 GB short" in text
    change = text.partition("The smallest change that would fit: ")[2]
    assert change == "8 a100-80g in place of 4 a100-80g (plan.gpus)"
    assert search(small(8, **settings))
    with pytest.raises(ConfigError, match=r"would fit: engine\.micro_batch_tokens=4096"):
        search(small(4, memory=1.6e9, roles=3))
    assert search(small(4, memory=1.6e9, roles=3, micro_batch_tokens=4096))
