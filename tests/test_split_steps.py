"""`optimize(step, split=k)`: training steps as users write them, errors, and what compilers need."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from split_checks import assert_all_close
from training_steps import BATCH, STEPS, TRANSFORMERS, smaller_case

from remat_opt import Plan, frontier, measure, optimize
from remat_opt.callable.compiling import compile_candidate
from remat_opt.planner.candidates import Candidate, Variants
from remat_opt.planner.prepared import Prepared
from remat_opt.planner.settings import check_settings
from remat_opt.planner.splitting import note_of_split
from remat_opt.planner.step import read_step
from remat_opt.trace.evaluation import evaluate_all
from remat_opt.trace.inline import Program

# These meet the whole batch in every layer (batch norm), or were split by hand along the batch.
IN_BATCH = {"conv_net", "nnx", "nnx_jit", "micro_batches"}
ROWS, SEQUENCES = 96, 6
SIZES = {name: {"hidden_layers": 3} for name in ("mlp", "gan", "mixed_precision")}
SIZES |= {name: {"layers": 1, "batch": SEQUENCES} for name in TRANSFORMERS}
FEWER = {"u_net": 2, **dict.fromkeys(TRANSFORMERS, SEQUENCES)}  # images, for which the CPU makes slow code, and tokens
BATCHES = {"u_net": 8, **dict.fromkeys(TRANSFORMERS, SEQUENCES)}
# bfloat16 is rounded once for each chunk; layers of the transformers are normalised in float32.
ROUNDING = {"mixed_precision": 1e-3, **dict.fromkeys(TRANSFORMERS, 1e-7)}
SPLIT = [name for name in STEPS if name not in {*IN_BATCH, "transformer"}]  # "dropout" is that with masks


def prepared_of(step: Any, args: tuple, kwargs: dict, target: str | None = None) -> Prepared:
    """A step as the planner sees it."""

    def read(function: Any, args: tuple, kwargs: dict) -> Prepared:
        traced = jax.jit(function.original, **function.options).trace(*args, **kwargs)
        return read_step(traced, check_settings(target=target, solver="auto"), function.options, (args, kwargs))

    return optimize(step).ask(read, args, kwargs)


def first_rows(leaf: Any, batch: int, rows: int) -> Any:
    """The first rows of an array of the batch, in float64 if it is one of floats."""
    if not isinstance(leaf, jax.Array):
        return leaf
    leaf = leaf[:rows] if leaf.ndim and leaf.shape[0] == batch else leaf
    return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def three_steps(program: Program, leaves: list[Any]) -> list[Any]:
    """The results of the third of three steps; state comes first among arguments and results."""
    types = [(jnp.shape(x), x.dtype) for x in leaves]
    step = jax.jit(lambda *arrays: evaluate_all(program, arrays))
    results: list[Any] = []
    for _ in range(3):
        results = step(*leaves)
        pairs = zip(types, results, strict=False)
        kept = itertools.takewhile(lambda pair: pair[0] == (pair[1].shape, pair[1].dtype), pairs)
        updated = [result for _, result in kept]
        leaves = [*updated, *leaves[len(updated) :]]
    return results


@pytest.mark.parametrize("name", SPLIT)
def test_three_steps_in_chunks_end_at_the_same_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for adaptive in ("adam", "adamw"):  # which would make steps of rounding errors, where a gradient is zero
        monkeypatch.setattr(optax, adaptive, lambda rate, **_: optax.sgd(0.01, momentum=0.9))
    with jax.enable_x64(True):
        case, rows = STEPS[name](), FEWER.get(name, ROWS)
        args, kwargs = jax.tree.map(
            lambda leaf: first_rows(leaf, BATCHES.get(name, BATCH), rows),
            (case.make_args(**SIZES.get(name, {})), case.make_kwargs()),
        )
        batch = prepared_of(case.step, args, kwargs).batch
        assert batch is not None
        assert batch.rows == rows
        assert bool(batch.reductions_used_by_rows) == (name == "gan")
        leaves = [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, jax.Array)]
        expected = three_steps(batch.program, leaves)
        for chunks in {3, rows}.intersection(batch.numbers):
            assert_all_close(three_steps(batch.split(chunks), leaves), expected, rtol=ROUNDING.get(name, 1e-12))


def test_a_called_step_in_chunks_ends_at_the_same_parameters() -> None:
    case = STEPS["vjp"]()
    params, *batch = case.make_args()
    step, expected = optimize(case.step, split=4, verify=False), params
    for _ in range(3):
        params, _ = step(params, *batch)
        expected, _ = jax.jit(case.step)(expected, *batch)
    assert_all_close(jax.tree.leaves(params), jax.tree.leaves(expected), rtol=1e-5)


def in_chunks(prepared: Prepared, chunks: int) -> Candidate:
    """A step in chunks, with nothing recomputed."""
    return Variants(prepared.in_chunks(chunks), "auto").reordered


def temp_bytes(candidate: Candidate) -> int:
    return compile_candidate(candidate.prepared, candidate.solution).temp_bytes


def test_a_network_of_activations_takes_a_fourth_in_four_chunks() -> None:
    case = smaller_case("u_net")
    prepared = prepared_of(jax.jit(case.step, donate_argnums=0), case.make_args(), {}, "h200")
    split = in_chunks(prepared, 4)
    assert temp_bytes(split) < 0.33 * compile_candidate(prepared, None).temp_bytes
    assert abs(split.extra_flops) < 0.01 * prepared.bridge.graph.flops


def test_recomputation_inside_takes_still_less_and_its_plan_can_be_used_again() -> None:
    case = smaller_case("vjp")
    step, args = jax.jit(case.step, donate_argnums=0), case.make_args()
    alone = temp_bytes(in_chunks(prepared_of(step, args, {}, "h200"), 4))
    function = optimize(step, split=4, target="h200")
    plan = function.plan(*args)
    assert (plan.chunks, plan.loop_bodies) == (4, 1)
    found = measure(function, *args)
    assert found.temp_bytes is not None
    assert found.temp_bytes < 0.5 * alone
    again = optimize(step, target="h200", plan=Plan.from_json(plan.to_json())).plan(*args)
    assert (again.chunks, again.runs) == (4, plan.runs)


def mean_step(p: jax.Array, x: jax.Array) -> jax.Array:
    return p - jax.grad(lambda p: jnp.mean(jnp.tanh(jnp.tanh(x @ p) @ p) ** 2))(p)


def normed_step(p: jax.Array, x: jax.Array) -> jax.Array:
    def loss(p: jax.Array) -> jax.Array:
        h = x
        for _ in range(4):
            h = jnp.tanh(h @ p)
            h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)
        return jnp.mean(h**4)

    return p - jax.grad(loss)(p)


def test_batches_that_cannot_be_split_are_refused_with_what_needs_the_whole() -> None:
    with pytest.raises(ValueError, match=r"split into 2, found none: the whole batch is needed by .*normed_step"):
        optimize(normed_step, split=2)(jnp.eye(8), jnp.ones((12, 8)))
    with pytest.raises(ValueError, match="found none"):
        optimize(lambda p: jnp.sin(p), split=2)(jnp.float32(1))


@pytest.mark.parametrize(
    ("split", "instead"),
    [
        (5, "divides the batch of 12, got split=5. Write split=4 or split=6"),
        (11, "Write split=6 or split=12, or give the batch 11 or 22 rows"),
        (13, "at most 12 chunks, as the batch has rows, got split=13. Write split=12 or less"),
    ],
)
def test_numbers_that_the_batch_does_not_have_are_refused(split: int, instead: str) -> None:
    with pytest.raises(ValueError, match=instead):
        optimize(mean_step, split=split)(jnp.eye(8), jnp.ones((12, 8)))


@pytest.mark.parametrize("split", [True, 0, 1, -2, 2.0, "4", None])
def test_what_is_no_number_of_chunks_is_refused_at_once(split: Any) -> None:
    with pytest.raises(ValueError, match=r"expected .* got split=.*\. Write split="):
        optimize(mean_step, split=split)


def test_without_split_nothing_is_split() -> None:
    assert optimize(mean_step, split=False, verify=False).plan(jnp.eye(8), jnp.ones((12, 8))).chunks == 0
    plan = optimize(mean_step, split=3, verify=False).plan(jnp.eye(8), jnp.ones((12, 8)))
    assert plan.chunks == 3
    assert not plan.is_plain
    assert "the batch of 12 (argument 1 along axis 0) runs in 3 chunks" in plan.note


def test_of_chunks_that_take_long_the_time_is_said_and_what_may_take_less() -> None:
    for rows, advice in ((13, " (its next smaller divisor is 1: another batch may take less)"), (12, "")):
        prepared = optimize(mean_step).prepare(jnp.eye(8), jnp.ones((rows, 8)))
        seconds = prepared.plain_graph.seconds
        assert f"runs in {rows} chunks, in about 10 times the plain step's time{advice}," in (
            note_of_split(prepared, rows, 9 * seconds) + ","
        )
        assert "times" not in note_of_split(prepared, rows, 0.9 * seconds)


def test_a_budget_is_met_in_chunks() -> None:
    x = jnp.ones((4096, 64))
    step = optimize(mean_step, split=4, budget=0.5)
    np.testing.assert_allclose(step(jnp.eye(64), x), mean_step(jnp.eye(64), x), rtol=1e-5)
    plan = step.plan(jnp.eye(64), x)
    assert plan.chunks == 4
    assert plan.measured is not None
    assert plan.plain_measured is not None
    assert plan.measured.temp_bytes <= 0.5 * plan.plain_measured.temp_bytes


def test_a_frontier_in_chunks_has_plans_in_chunks() -> None:
    case = STEPS["vjp"]()
    args = case.make_args()
    points = frontier(case.step, *args, split=4)
    assert {point.plan.chunks for point in points} == {4}
    assert points[0].peak_bytes < frontier(case.step, *args)[0].peak_bytes
    found = optimize(case.step, plan=points[0].plan)(*args)
    for one, ours in zip(jax.tree.leaves(jax.jit(case.step)(*args)), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(ours, one, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(one))))
