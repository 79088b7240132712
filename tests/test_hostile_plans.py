"""Plan files from outside, with digests that are right: refused before anything is listed, or a right step."""

import contextlib
import copy
import dataclasses
import json
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_by_op import run_op_by_op
from step_networks import sine_arguments
from step_networks import sine_step as step

from remat_opt import Plan, PlanError, RematWarning, optimize
from remat_opt.loops.choice import Chunks, LoopChoice
from remat_opt.planner.plan import _digest_of_schedule, digest
from remat_opt.planner.plan_checks import MOST_OPERATIONS, check_runs, most_runs

pytestmark = pytest.mark.short

# Each plan that can be read is traced, planned and run: a quarter of the usual number in the suite, all in a night.
EXAMPLES = 25 if settings.default.max_examples == 100 else settings.default.max_examples

PARAMS, X = sine_arguments(width=16, layers=6, batch=128)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return optimize(step, budget=0.7).plan(PARAMS, X)


def signed(document: dict) -> str:
    """The text of an edited plan with digests that are right, as far as there are parts to take them of."""
    with contextlib.suppress(Exception):
        document["schedule_digest"] = _digest_of_schedule(document)
    return json.dumps(document)


HOSTILE_RANGES = {
    "huge": [[0, 10**9]],
    "no integer of 64 bits": [[10**30, 1]],
    "an operation many times": [[0, 1]] * 10**4,
    "negative": [[-1, 1]],
    "none": [[0, 0]],
    "of three": [[0, 1, 1]],
    "floats": [[0.0, 1.0]],
    "true": [[True, True]],
    "text": ["ab"],
    "null": None,
}


@pytest.mark.parametrize("part", ["the whole", "a first run", "a repeat"])
@pytest.mark.parametrize("ranges", HOSTILE_RANGES.values(), ids=HOSTILE_RANGES)
def test_ranges_are_refused_before_they_are_listed(plan: Plan, ranges: Any, part: str) -> None:
    document = json.loads(plan.to_json())
    if part == "the whole":
        document["schedule"] = [{"recomputed": False, "ops": ranges}]
    else:
        run = next(run for run in document["schedule"] if run["recomputed"] is (part == "a repeat"))
        run["ops"] = ranges
    text = signed(document)
    tracemalloc.start()
    with pytest.raises(PlanError, match=r"schedule"):
        Plan.from_json(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6 + 400 * len(text) / 3  # the lists of the text itself are the most


def first_run(document: dict) -> dict:
    return next(run for run in document["schedule"] if not run["recomputed"])


def recompute_first(document: dict) -> None:
    document["schedule"].sort(key=lambda run: not run["recomputed"])


DAMAGED_SCHEDULES = {
    "a run is missing": lambda document: document["schedule"].pop(0),
    "the end is missing": lambda document: document["schedule"].pop(),
    "an op is missing": lambda document: first_run(document)["ops"][0].__setitem__(0, 1),
    "an op stands twice": lambda document: first_run(document)["ops"].insert(0, [0, 1]),
    "an op is not there": lambda document: first_run(document)["ops"].append([10**6, 1]),
    "a negative op": lambda document: first_run(document)["ops"].append([-1, 1]),
    "backwards": lambda document: document["schedule"].reverse(),
    "recomputed before it was computed": recompute_first,
    "a saved value is not there": lambda document: document["choice"]["saved"].append(10**6),
}


@pytest.mark.parametrize("damage", DAMAGED_SCHEDULES.values(), ids=DAMAGED_SCHEDULES)
def test_a_damaged_schedule_is_refused(plan: Plan, damage: Callable[[dict], Any]) -> None:
    document = json.loads(plan.to_json())
    damage(document)
    with pytest.raises(PlanError, match="expected"):
        optimize(step, plan=Plan.from_json(signed(document)))(PARAMS, X)


def test_a_schedule_of_another_number_of_operations_is_refused_unlisted(plan: Plan) -> None:
    document = json.loads(plan.to_json())
    count = sum(length for run in document["schedule"] if not run["recomputed"] for _, length in run["ops"])
    for other in (count - 1, count + 1, MOST_OPERATIONS):
        runs = [{"recomputed": False, "ops": [[0, other]]}, {"recomputed": True, "ops": [[0, 1]]}]
        hostile = Plan.from_json(signed({**document, "schedule": runs}))
        with pytest.raises(PlanError, match=f"expected {count}, as the program has, operations|schedule"):
            optimize(step, plan=hostile)(PARAMS, X)
        assert "schedule" not in vars(hostile)


def test_runs_of_all_operations_are_bounded() -> None:
    for count in (1, 60, 3000, 10**5):
        whole = (((0, count),), False)
        again = (((0, count),), True)
        assert check_runs([whole, again]) == count
        with pytest.raises(ValueError, match="runs of"):
            check_runs([whole, *[again] * (most_runs(count) // count)])


def with_effects(x: jax.Array) -> jax.Array:
    def loss(x: jax.Array) -> jax.Array:
        for _ in range(4):
            jax.debug.print("{}", x.sum(), ordered=True)
            x = jnp.sin(jnp.sin(x) @ x)
        return x.sum()

    return x - jax.grad(loss)(x)


def test_operations_with_effects_run_once_and_in_their_order() -> None:
    x = jnp.ones((64, 64))
    plan = optimize(with_effects).plan(x)
    document = json.loads(plan.to_json())
    graph = optimize(with_effects).explain(x).graph
    effects = [index for index, op in enumerate(graph.ops) if not op.repeatable]
    assert len(effects) > 1
    assert any(run["recomputed"] for run in document["schedule"])
    for again in effects:
        runs = [*document["schedule"], {"recomputed": True, "ops": [[again, 1]]}]
        with pytest.raises(PlanError, match="again"):
            optimize(with_effects, plan=Plan.from_json(signed({**document, "schedule": runs})))(x)
    order = [op for run in plan.schedule.runs if not run.recomputed for op in run.ops]
    one, other = (order.index(op) for op in effects[:2])
    order[one], order[other] = order[other], order[one]
    runs = [{"recomputed": False, "ops": [[op, 1] for op in order]}, {"recomputed": True, "ops": [[0, 1]]}]
    with pytest.raises(PlanError, match=r"order of operations|too early"):
        optimize(with_effects, plan=Plan.from_json(signed({**document, "schedule": runs})))(x)


LAYERS = 12
STACK = jnp.asarray(np.random.default_rng(2).normal(size=(LAYERS, 8, 8)) / 4, jnp.float32)


def scanned(stack: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss(stack: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return h + jnp.sin(jnp.tanh(h @ w) @ w.T), None

        return jnp.mean(jax.lax.scan(layer, x, stack)[0] ** 2)

    value, gradient = jax.value_and_grad(loss)(stack)
    return stack - 0.1 * gradient, value


SMALL = jnp.asarray(np.random.default_rng(3).normal(size=(32, 8)), jnp.float32)
LOOPS = {
    "one level": LoopChoice(),
    "on the host": LoopChoice(host=frozenset({0, 1})),
    "chunks": LoopChoice(chunk=4, step_bytes=4000),
    "kinds of chunks": LoopChoice(chunk=2, earlier=(Chunks(1, 3), Chunks(1, 4)), update=True),
}


@pytest.mark.parametrize(
    "earlier",
    [(Chunks(1, 2),) * 4, (Chunks(3, 2), Chunks(2, 3))],
    ids=["four kinds of few steps", "two kinds of all steps"],
)
def test_chunks_that_a_loop_has_no_room_for_are_refused(earlier: tuple[Chunks, ...]) -> None:
    of_loop = optimize(scanned, verify=False).plan(STACK, SMALL)
    assert len(STACK) == LAYERS == 12
    damaged = dataclasses.replace(of_loop, loops=((0, LoopChoice(chunk=1, earlier=earlier)),))
    with pytest.raises(PlanError, match="expected at most 3 kinds of chunks before the last, in 12 steps"):
        optimize(scanned, plan=damaged)(STACK, SMALL)


@pytest.fixture(scope="module")
def documents(plan: Plan) -> list[tuple[Any, tuple, dict]]:
    """Steps with their arguments, and plans of them as documents."""
    found = [(step, (PARAMS, X), json.loads(plan.to_json()))]
    of_loop = optimize(scanned, verify=False).plan(STACK, SMALL)
    assert of_loop.loops
    for choice in LOOPS.values():
        document = json.loads(dataclasses.replace(of_loop, loops=((0, choice),)).to_json())
        # The digests are those of an edit, so that the schedule of the loops as they are now is derived.
        found.append((scanned, (STACK, SMALL), document))
    return found


NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([10**9, 2**31, 2**63, -(2**63), 10**30, 0.0, 0.5, 1e300, -1.5]),
    st.floats(allow_nan=True, allow_infinity=True),
)
PARTS = st.one_of(
    NUMBERS,
    st.none(),
    st.booleans(),
    st.sampled_from(["", "text", "min", "9GB", "nan"]),
    st.lists(st.integers(-1, 40), max_size=3),
    st.sampled_from([{}, [], [[0, 1]], [[0, 10**9]], {"ops": [[0, 1]], "recomputed": True}]),
)


def nodes(document: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths to all parts of a document."""
    for key, child in document.items() if isinstance(document, dict) else enumerate(document):
        yield (*path, key)
        if isinstance(child, (dict, list)):
            yield from nodes(child, (*path, key))


def mutate(document: dict, data: st.DataObject) -> None:
    """One edit somewhere: first a field, so that each is as likely, then what is inside of it."""
    part = data.draw(st.sampled_from(sorted(document)))
    inside = [(part,), *((part, *path) for path in nodes(document[part]))] if _is_parent(document[part]) else [(part,)]
    path = data.draw(st.sampled_from(inside))
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    key, old = path[-1], parent[path[-1]]
    kind = data.draw(st.sampled_from(["nudge", "nudge", "nudge", "junk", "drop", "repeat", "swap", "swap"]))
    if kind == "nudge" and isinstance(old, bool):
        parent[key] = not old
    elif kind == "nudge" and type(old) in (int, float):
        parent[key] = data.draw(st.one_of(st.sampled_from([old + 1, max(old - 1, 0)]), st.integers(0, 70)))
    elif kind == "nudge" and isinstance(old, str):
        parent[key] = old + "x"
    elif kind == "drop" and isinstance(parent, list):
        del parent[key]
    elif kind == "repeat" and isinstance(parent, list):
        parent.insert(data.draw(st.integers(0, len(parent))), copy.deepcopy(old))
    elif kind == "swap" and isinstance(parent, list):
        other = data.draw(st.integers(0, len(parent) - 1))
        parent[key], parent[other] = parent[other], parent[key]
    elif kind == "junk":
        parent[key] = copy.deepcopy(data.draw(PARTS))  # what is drawn may be edited next
    elif data.draw(st.integers(0, 9)) == 0:
        del parent[key]


def _is_parent(value: Any) -> bool:
    return isinstance(value, (dict, list)) and bool(value)


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_a_mutated_plan_is_refused_or_gives_a_right_step(documents: list, data: st.DataObject) -> None:
    """With digests that are right: nothing but what is checked keeps it from being used."""
    fun, args, original = data.draw(st.sampled_from(documents))
    document = copy.deepcopy(original)
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(document, data)
        if not document:
            break
    if data.draw(st.booleans()) and isinstance(document.get("saved"), list):
        with contextlib.suppress(TypeError, AttributeError):
            document["saved_digest"] = digest(tuple(document["saved"]))
    started = time.process_time()
    with contextlib.suppress(PlanError), warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)
        optimized = optimize(fun, plan=Plan.from_json(signed(document)))
        found = run_op_by_op(optimized.jaxpr(*args), jax.tree.leaves(args))
        str(optimized.explain(*args))
        for one, other in zip(found, jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert time.process_time() - started < 20
