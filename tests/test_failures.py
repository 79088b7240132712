"""Where planning or writing fails, the error is raised, or the step runs unchanged and says why."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun, primitives
from step_networks import sine_arguments
from step_networks import sine_step as step

import remat_opt.planner.prepared
from remat_opt import RematWarning, optimize

pytestmark = pytest.mark.short

PARAMS, X = sine_arguments(width=16, layers=4, batch=128)


EXPECTED = jax.jit(step)(PARAMS, X)

STAGES = {
    "inlining": "remat_opt.rewrites.captured.inline",
    "masks": "remat_opt.rewrites.captured.mask_by_outputs",
    "graph": "remat_opt.planner.prepared.build",
    "loops": "remat_opt.planner.candidates.ways_to_write",
    "writing loops": "remat_opt.planner.prepared.write_loops",
    "search": "remat_opt.planner.candidates.Variants.candidate",
    "names": "remat_opt.planner.prepared.name_values",
    "fingerprint": "remat_opt.planner.prepared.fingerprint",
    "writing": "remat_opt.planner.prepared.write",
    "compiling candidates": "remat_opt.callable.planned.compile_as_called",
    "options": "remat_opt.callable.jit_options.compiler_options_for",
}


class BrokenStage(Exception):
    """Not of a class that anything here expects."""


def broken(*_: Any, **__: Any) -> Any:
    raise BrokenStage("a bug in remat_opt")


def break_stage(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    monkeypatch.setattr(STAGES[stage], broken)


def assert_right(found: Any) -> None:
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7), found, EXPECTED)


USES = {
    "call": lambda optimized: assert_right(optimized(PARAMS, X)),
    "lower": lambda optimized: assert_right(optimized.lower(PARAMS, X).compile()(PARAMS, X)),
    "jaxpr": lambda optimized: assert_right(
        jax.tree.unflatten(jax.tree.structure(EXPECTED), jaxpr_as_fun(optimized.jaxpr(PARAMS, X))(*LEAVES))
    ),
    "inside": lambda optimized: assert_right(jax.jit(lambda params, x: optimized(params, x))(PARAMS, X)),
}
LEAVES = jax.tree.leaves((PARAMS, X))


@pytest.mark.parametrize(("stage", "budget"), [*((stage, 0.6) for stage in STAGES), ("search", None)])
def test_a_stage_that_fails_raises_by_default_and_falls_back_on_request(
    stage: str, budget: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_stage(monkeypatch, stage)
    with pytest.raises(BrokenStage, match="a bug in remat_opt"):
        optimize(step, budget=budget)(PARAMS, X)
    optimized = optimize(step, budget=budget, on_error="plain")
    with pytest.warns(RematWarning, match=r"failed: BrokenStage: a bug in remat_opt.*runs as it was given") as caught:
        assert_right(optimized(PARAMS, X))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_right(optimized(PARAMS, X))  # without planning again
    plan = optimized.plan(PARAMS, X)
    assert plan.is_plain
    assert "BrokenStage: a bug in remat_opt" in plan.note
    assert "a bug in remat_opt" in str(optimized.explain(PARAMS, X)).replace("\n", " ")


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("stage", ["inlining", "search", "writing"])
def test_whatever_is_asked_of_the_step_falls_back(
    stage: str, use: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_stage(monkeypatch, stage)
    with pytest.raises(BrokenStage):
        use(optimize(step))
    with pytest.warns(RematWarning, match="BrokenStage: a bug in remat_opt"):
        use(optimize(step, on_error="plain"))


def refused(*inputs: Any) -> Any:
    """What no compiler takes: a call of something that is nowhere."""
    return jax.ffi.ffi_call("remat_opt_tests_nowhere", [jax.ShapeDtypeStruct((), jnp.float32)])(*inputs)


@pytest.mark.parametrize("planned_before", [False, True])
def test_a_written_step_that_does_not_compile_falls_back(planned_before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    write = remat_opt.planner.prepared.write

    def write_wrongly(*args: Any) -> list[Any]:
        *results, value = write(*args)
        return [*results, value + refused()[0]]

    monkeypatch.setattr(remat_opt.planner.prepared, "write", write_wrongly)
    with pytest.raises(jax.errors.JaxRuntimeError):
        optimize(step)(PARAMS, X)
    given = jax.tree.map(jnp.copy, PARAMS)
    optimized = optimize(step, on_error="plain", donate_argnums=0)
    if planned_before:
        assert not optimized.plan(PARAMS, X).is_plain
    with pytest.warns(RematWarning, match=r"compiling the rewritten step failed: JaxRuntimeError"):
        assert_right(optimized(given, X))
    assert optimized.plan(PARAMS, X).is_plain


def test_another_signature_is_not_touched_by_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    optimized = optimize(step, on_error="plain")
    assert not optimized.plan(PARAMS, X).is_plain
    break_stage(monkeypatch, "search")
    with pytest.warns(RematWarning, match="BrokenStage"):
        optimized(PARAMS, X[::2])
    monkeypatch.undo()
    assert_right(optimized(PARAMS, X))
    assert optimized.plan(PARAMS, X[::2]).is_plain
    assert not optimized.plan(PARAMS, X).is_plain
    segments = [one for one in optimized.jaxpr(PARAMS, X).eqns if one.primitive is primitives.remat_p]
    assert segments


def test_falling_back_compiles_a_step_that_is_right_once() -> None:
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    optimized = optimize(step, on_error="plain")
    assert not optimized.plan(PARAMS, X).is_plain
    compiled.clear()
    assert_right(optimized(PARAMS, X))
    assert_right(optimized(PARAMS, X))
    assert len(compiled) == 1


def test_what_goes_wrong_while_the_step_runs_is_the_users() -> None:
    def checked(params: Any, x: jax.Array) -> Any:
        def refuse(value: Any) -> Any:
            if not np.isfinite(value):
                raise OverflowError("the loss is not finite")
            return value

        new, value = step(params, x)
        return new, jax.pure_callback(refuse, jax.ShapeDtypeStruct((), jnp.float32), value)

    optimized = optimize(checked, on_error="plain")
    assert_right(optimized(PARAMS, X))
    assert not optimized.plan(PARAMS, X).is_plain
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Exception, match="the loss is not finite"):  # which exception depends on the release of JAX
            jax.block_until_ready(optimized(PARAMS, X * jnp.inf))
