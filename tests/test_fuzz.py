"""Random training steps, rewritten in many ways: the same values to the bit, the same types, never a higher peak.

`python -m benchmarks.fuzz` runs thousands of them.
"""

import io
import json
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import primitives
from rich.console import Console

import remat_opt
import remat_opt.planner.candidates
import remat_opt.planner.prepared
from benchmarks import fuzz, fuzz_worker
from remat_opt.emit import train_step
from remat_opt.planner.prepared import prepare
from remat_opt.rewrites.captured import capture
from remat_opt.targets import resolve_target
from remat_opt.trace import compat, inline
from tests.op_by_op import run_op_by_op
from tests.program_checks import How, any_way, check_compiled, check_rewritten, found_for
from tests.random_programs import RandomProgram, programs, random_program


def few(count: int) -> Callable:
    """So many programs, each as slow as it may be."""
    return hypothesis.settings(max_examples=count, suppress_health_check=list(hypothesis.HealthCheck))


def rewritten(program: RandomProgram, how: How) -> None:
    hypothesis.event("rewritten" if check_rewritten(program, how) else "nothing to gain")


@few(12)
@given(program=programs(most_statements=12), way=st.randoms(use_true_random=False))
def test_small_programs_keep_their_values_for_any_target_solver_and_budget(program: RandomProgram, way: Any) -> None:
    rewritten(program, any_way(way))


@few(8)
@given(program=programs(most_statements=20), share=st.sampled_from([None, -1.0, 0.5]))
def test_programs_keep_their_values_with_the_search_that_users_get(program: RandomProgram, share: float | None) -> None:
    rewritten(program, How("cpu", "auto", share))


def test_what_is_kept_and_can_no_longer_be_written_over_is_not_kept() -> None:
    """Such a program was met once: a schedule that was to fill a budget was far above it."""
    assert check_rewritten(fuzz_worker.drawn(7, 69)[0], How("h200", "auto", -1.0))


@pytest.mark.parametrize("seed", range(2))
def test_large_programs_keep_their_values(seed: int) -> None:
    source = random.Random(f"large/{seed}")
    for _ in range(3):
        check_rewritten(random_program(source, source.choice((30, 40, 60))), How("h200", "lower_sets", None))


@few(5)
@given(program=programs(most_statements=12))
def test_programs_give_their_values_when_they_are_compiled_and_called(program: RandomProgram) -> None:
    hypothesis.event("rewritten" if check_compiled(program, 0.7) else "nothing to gain")


def test_op_by_op_what_nobody_reads_does_not_run() -> None:
    """The rule's function is called in the rule: its derivative, which JAX cannot run, is read by nobody."""
    sine = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (sine(x), x), lambda x, g: (g * jnp.cos(x),))
    traced = jax.jit(lambda x: jax.jvp(jax.grad(sine), (x,), (1.0,))).trace(0.5)
    assert "custom_lin" in {equation.primitive.name for equation in traced.jaxpr.eqns}
    assert run_op_by_op(traced.jaxpr, [jnp.float32(0.5)]) == [jnp.cos(0.5), -jnp.sin(0.5)]


# The checks can fail


def with_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed runs draw other random numbers."""
    evaluate = train_step._Writer.evaluate

    def wrongly(self: Any, ops: Any, environment: dict, on_demand: dict, *, first_run: bool) -> None:
        for value, found in environment.items():
            if not first_run and jax.dtypes.issubdtype(found.dtype, jax.dtypes.prng_key):
                environment[value] = jax.vmap(lambda key: jax.random.fold_in(key, 1))(found[None])[0]
        evaluate(self, ops, environment, on_demand, first_run=first_run)

    monkeypatch.setattr(train_step._Writer, "evaluate", wrongly)


def with_values_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed runs take one of their inputs for another one of the same type."""
    evaluate = train_step._Writer.evaluate

    def wrongly(self: Any, ops: Any, environment: dict, on_demand: dict, *, first_run: bool) -> None:
        by_type: dict[Any, list[int]] = {}
        for value, found in () if first_run else environment.items():
            by_type.setdefault((found.shape, found.dtype), []).append(value)
        for one, *others in by_type.values():
            if others:
                environment[one], environment[others[0]] = environment[others[0]], environment[one]
        evaluate(self, ops, environment, on_demand, first_run=first_run)

    monkeypatch.setattr(train_step._Writer, "evaluate", wrongly)


def with_a_term_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of cotangents have one term only."""
    does_nothing = inline._does_nothing
    monkeypatch.setattr(
        inline,
        "_does_nothing",
        lambda equation: does_nothing(equation) or equation.primitive is primitives.add_jaxvals_p,
    )


def with_weak_types_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are what they are in NumPy."""
    write = remat_opt.planner.prepared.write
    monkeypatch.setattr(
        remat_opt.planner.prepared,
        "write",
        lambda *args: [jax.lax.convert_element_type(x, x.dtype) for x in write(*args)],
    )


def with_a_higher_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search takes a schedule of more memory for one of less."""
    monkeypatch.setattr(
        remat_opt.planner.candidates.Candidate,
        "peak",
        property(lambda self: 10 * self.solution.peak if self.solution.schedule.recomputed else self.solution.peak),
    )


@pytest.mark.parametrize(
    "mistake", [with_another_key, with_values_exchanged, with_a_term_dropped, with_weak_types_lost, with_a_higher_peak]
)
def test_mistakes_are_noticed(mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    source = random.Random("mistakes")
    way = How("cpu", "chen", None)
    with pytest.raises(AssertionError, match=r"result|peak"):
        any(check_rewritten(random_program(source, 16), way) and False for _ in range(40))


# The nightly command


def test_a_process_that_dies_is_named_and_its_program_is_run_again(tmp_path: Path) -> None:
    worker = Path(__file__).parent / "dying_worker.py"
    told: list[str] = []
    runner = fuzz.Runner(0, told.append, command=(sys.executable, str(worker), str(tmp_path)), silence=2)
    runner.run(range(1, 11))
    found = runner.found
    assert {number for number in range(1, 11) if (tmp_path / f"{number}").exists()} == set(range(1, 11))
    begun = {number: (tmp_path / f"{number}").read_text().count("begun") for number in range(1, 11)}
    assert begun == {number: 2 if number in (3, 5, 7) else 1 for number in range(1, 11)}
    expected = {**dict.fromkeys(range(1, 11), "rewritten"), 5: "died twice", 7: "died twice", 9: "wrong"}
    assert found.outcomes == expected
    assert not found.is_right
    once = found.died_once
    assert [(one.number, one.stage) for one in once] == [(3, "compiled, rewritten")]
    assert once[0].cause == "SIGABRT\nCheck failed: buffer != nullptr"
    assert [one.number for one in found.deaths] == [3, 5, 5, 7, 7, 9]
    assert "without a word" in found.deaths[3].cause
    assert found.failures[9]["statements"] == 8
    console = Console(width=120, record=True, file=io.StringIO())
    fuzz.report(console, 0, found)
    printed = console.export_text()
    for row in ("wrong .* 1 ", "died twice .* 2 ", "passed when run again .* 1 ", "compiled, too .* 5 "):
        assert re.search(row, printed), row
    assert "died over 3 (compiled, rewritten): SIGABRT" in printed


def test_a_worker_says_what_it_begins_and_what_came_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = (next(n for n in range(100) if n % 10 and fuzz_worker.drawn(0, n)[2] == count) for count in (8, 60))
    longest = len(fuzz_worker.drawn(0, small)[0].source)

    def check(program: RandomProgram, how: How) -> bool:
        if len(program.source) > longest:
            raise AssertionError("too long")
        return True

    monkeypatch.setattr(fuzz_worker, "check_rewritten", check)
    for number in (small, large):
        fuzz_worker.check_number(0, number)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    of_small, of_large = ([one for one in lines if one["number"] == number] for number in (small, large))
    assert of_small == [
        {"number": small, "stage": "op by op"},
        {"number": small, "outcome": "rewritten", "compiled": False},
    ]
    assert of_large[0] == {"number": large, "stage": "op by op"}
    first, smaller = (one["failure"] for one in of_large if "failure" in one)
    assert smaller["statements"] < first["statements"] == 60
    assert "AssertionError: too long" in smaller["brief"]
    assert of_large[-1]["outcome"] == "wrong"


def test_the_time_that_a_program_may_take_is_the_processors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, how, _ = fuzz_worker.drawn(0, 1)
    ended = threading.Event()

    def wait(*_: object) -> bool:
        time.sleep(1.0)  # as where others have the processor
        return True

    def work(*_: object) -> bool:
        began = time.monotonic()
        while time.monotonic() < began + 60 and not ended.is_set():
            pass
        return True

    monkeypatch.setattr(fuzz_worker, "MOST_SECONDS", 0.5)
    monkeypatch.setattr(fuzz_worker, "end_process", ended.set)
    monkeypatch.setattr(fuzz_worker, "check_rewritten", wait)
    assert fuzz_worker.check(program, how, 1)
    assert not ended.is_set()
    monkeypatch.setattr(fuzz_worker, "check_rewritten", work)
    fuzz_worker.check(program, how, 1)
    assert ended.is_set()
    failure = json.loads(capsys.readouterr().out.splitlines()[-1])["failure"]
    assert "over 0.5 s" in failure["brief"]
    assert "in work" in failure["message"]


REFUSED = """
import jax

@jax.custom_vjp
def rule(x):
    return x

rule.defvjp(lambda x: (x, None), lambda kept, g: (g,))

def step(x):
    return jax.jvp(rule, (x,), (x,))

def arguments():
    return (1.0,)
"""


def test_a_program_that_jax_refuses_is_not_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = RandomProgram(REFUSED, ()), How("cpu", "auto", None), 1

    def check(program: RandomProgram, how: How) -> bool:
        return jax.jit(program.step)(*program.arguments()) is None

    monkeypatch.setattr(fuzz_worker, "check_rewritten", check)
    monkeypatch.setattr(fuzz_worker, "drawn", lambda seed, number: drawn)
    fuzz_worker.check_number(0, 1)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"number": 1, "outcome": "refused by JAX", "compiled": False}


# What was found


def test_a_renewed_key_takes_the_place_of_a_donated_one_on_gpus() -> None:
    """Updated weights are given a layout; keys have none that can be given, and the step could not be lowered."""

    def step(state: dict, x: jax.Array) -> Any:
        key, of_mask = jax.random.split(state["key"])

        def loss(weights: list) -> jax.Array:
            h = jnp.where(jax.random.bernoulli(of_mask, 0.8, x.shape), x, 0)
            for w in weights:
                h = jnp.sin(h @ w)
            return jnp.mean(h**2)

        weights = jax.tree.map(lambda w, g: w - 0.1 * g, state["weights"], jax.grad(loss)(state["weights"]))
        return {"key": key, "weights": weights}

    state = {"key": jax.random.key(0), "weights": [jnp.eye(8)] * 6}
    captured = capture(jax.jit(step, donate_argnums=0), (state, jnp.ones((64, 8))), {})
    prepared = prepare(captured, resolve_target("h200"))
    found = found_for(prepared, How("h200", "auto", None))
    assert not found.is_unchanged
    jax.jit(lambda *leaves: found.prepared.emit(found.solution, leaves)).lower(*captured.input_avals).compile()


def test_arrays_that_a_branch_closes_over_are_found_where_its_memory_is_predicted() -> None:
    """The branches' jaxprs were looked at without their constants, and planning failed."""

    def rule(h: jax.Array) -> jax.Array:
        return h * jnp.asarray(np.linspace(1, 2, 8), jnp.float32)

    custom = jax.custom_vjp(rule)
    custom.defvjp(lambda h: (rule(h), h), lambda h, g: (g * jnp.cos(h),))

    def step(w: jax.Array, x: jax.Array, flag: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            h = x
            for _ in range(4):
                h = jax.lax.cond(flag, custom, jnp.sin, jnp.sin(h @ w))
            return jnp.mean(h**2)

        return w - jax.grad(loss)(w)

    captured = capture(jax.jit(step), (jnp.eye(8), jnp.ones((64, 8)), jnp.array(True)), {})
    branches = [one.params["branches"] for one in captured.program.equations if one.primitive is primitives.cond_p]
    assert any(compat.constants_of(branch) for pair in branches for branch in pair)
    assert prepare(captured, resolve_target("cpu")).problem.plain.peak > 0


def test_barriers_in_small_loops_reach_the_cpu() -> None:
    """Kept barriers had no code in loops that the compiler hoists into one kernel; those of several arrays abort it."""

    def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        held = jax.lax.optimization_barrier(jnp.sin(x))
        return jnp.cos(carry) + held, held

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            h = x
            for _ in range(6):
                h = jnp.sin(jnp.sin(h @ w))
            return jnp.mean(h**2) + jnp.sum(jax.lax.scan(body, w[0], w[:5])[0])

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    w, x = 0.1 * jnp.eye(8), jnp.ones((256, 8))
    optimized = remat_opt.optimize(step)
    assert not optimized.plan(w, x).is_plain
    for found, expected in zip(optimized(w, x), jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("budget", [None, 0.6])
def test_a_loop_may_be_repeated_for_one_result_where_the_other_is_kept_anyway(budget: float | None) -> None:
    """The step of the reverse loop then had that one twice where its memory is predicted, and planning failed."""

    def turn(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h @ w)
        return h, jnp.cos(h)

    def layer(h: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        last, path = jax.lax.scan(turn, h, weights)
        return jnp.sin(jnp.exp(-last)) + jnp.sin(path).sum(0), last

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> Any:
            h, all_last = jax.lax.scan(layer, x, w)
            return jnp.mean(h**2), all_last

        (value, kept), gradient = jax.value_and_grad(loss, has_aux=True)(w)
        return w - 0.1 * gradient, value, kept

    w, x = 0.1 * jnp.ones((8, 3, 8, 8)), jnp.ones((256, 8))
    optimized = remat_opt.optimize(step, budget=budget)
    assert not optimized.plan(w, x).is_plain
    for found, expected in zip(optimized(w, x), jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
