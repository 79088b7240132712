"""A plan can be written, read, compared, edited by its saved set, and used again on its own program only."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checks import assert_close
from jax.extend.core import primitives
from step_networks import sine_arguments, step_with
from step_networks import sine_step as step

from remat_opt import Plan, PlanError, RematWarning, optimize
from remat_opt.planner.plan import SCHEMA
from remat_opt.rewrites.captured import capture
from remat_opt.trace.fingerprint import fingerprint

pytestmark = pytest.mark.short

WIDTH, LAYERS, BATCH = 32, 8, 256


PARAMS, X = sine_arguments(WIDTH, LAYERS, BATCH)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Planned and compiled: it has measured figures."""
    return optimize(step, budget=0.6).plan(PARAMS, X)


@pytest.fixture(scope="module")
def larger() -> Plan:
    """A plan that saves more."""
    return optimize(step, budget=0.85).plan(PARAMS, X)


def changed(plan: Plan, change: Callable[[dict], Any]) -> str:
    """The plan's text after an edit by hand."""
    document = json.loads(plan.to_json())
    change(document)
    return json.dumps(document)


def assert_still_right(plan: Plan) -> Plan:
    """Use a plan: the step computes what it computed, and saves what the plan that it has now names."""
    optimized = optimize(step, plan=plan)
    assert_close(optimized(PARAMS, X), jax.jit(step)(PARAMS, X), atol=1e-7)
    used = optimized.plan(PARAMS, X)
    named = {one.params["name"] for one in optimized.jaxpr(PARAMS, X).eqns if one.primitive is primitives.name_p}
    assert named == set(used.saved)
    return used


# Written and read


def test_the_text_of_a_plan_gives_the_plan_back(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert hash(again) == hash(plan)
    assert {again, plan} == {plan}
    assert not again.edited
    assert plan.measured is not None
    assert json.loads(plan.to_json())["schema"] == SCHEMA


def test_a_plan_prints_in_a_few_lines(plan: Plan) -> None:
    lines = str(plan).splitlines()
    assert len(lines) <= 4
    assert lines[0].startswith(f"Plan for cpu, budget 0.6: {len(plan.saved)} tensors saved")
    assert f"{plan.measured.temp_bytes / 1e6:,.1f} MB compiled" in lines[1]
    assert repr(plan) == str(plan)


def test_plans_are_saved_and_loaded(plan: Plan, tmp_path: Path) -> None:
    for path in (tmp_path / "plan.json", str(tmp_path / "text.json")):
        plan.save(path)
        assert Plan.load(path) == plan
        assert Path(path).read_bytes() == plan.to_json().encode()


def test_plans_are_frozen_and_compared_by_what_they_say(plan: Plan, larger: Plan) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.saved = ()
    assert plan != larger
    assert plan.fingerprint == larger.fingerprint
    assert dataclasses.replace(plan) == plan
    assert dataclasses.replace(plan, note="another") != plan


def test_a_loaded_plan_gives_the_same_step(plan: Plan) -> None:
    used = assert_still_right(Plan.from_json(plan.to_json()))
    assert (used.schedule, used.choice, used.saved) == (plan.schedule, plan.choice, plan.saved)
    assert used.predicted == plan.predicted
    assert used.measured == plan.measured
    assert not used.edited


def test_a_plan_of_a_plain_step_is_used_again(tmp_path: Path) -> None:
    plain = optimize(step, budget=1.0).plan(PARAMS, X)
    plain.save(tmp_path / "plain.json")
    with pytest.warns(RematWarning, match="as it was given"):
        assert optimize(step, plan=Plan.load(tmp_path / "plain.json")).plan(PARAMS, X).is_plain


def test_a_plan_and_a_budget_exclude_each_other(plan: Plan) -> None:
    for budget in (0.5, "min", 10**9):
        with pytest.raises(ValueError, match="plan or a budget"):
            optimize(step, plan=plan, budget=budget)
    with pytest.raises(TypeError, match=r"Plan\.load"):
        optimize(step, plan=plan.to_json())


# For one program only


@pytest.mark.parametrize(
    ("other", "args", "difference"),
    [
        (step, (PARAMS, X[::2]), rf"input {2 * LAYERS} is float32\[{BATCH}, {WIDTH}\].*float32\[{BATCH // 2}, {WIDTH}"),
        (step, (PARAMS, X.astype(jnp.bfloat16)), rf"input {2 * LAYERS} is float32.*bfloat16"),
        (step, (sine_arguments(WIDTH, LAYERS + 1, BATCH)[0], X), rf"{2 * LAYERS + 1} input arrays.*{2 * LAYERS + 3}"),
        (lambda params, x: (*step(params, x), x + 1), (PARAMS, X), r"equations"),
        (step_with(jnp.cos), (PARAMS, X), r"operation|equations"),
        (step_with(jnp.sin, rate=0.2), (PARAMS, X), r"operation"),
    ],
    ids=["shape", "dtype", "inputs", "more equations", "operation", "literal"],
)
def test_a_plan_for_another_program_is_refused_with_the_difference(
    plan: Plan, other: Callable, args: tuple, difference: str
) -> None:
    optimized = optimize(other, plan=plan)
    for use in (optimized, optimized.plan, optimized.lower):
        with pytest.raises(PlanError, match=rf"(?s)another: .*({difference}).*Plan again"):
            use(*args)


def test_a_plan_of_other_versions_or_of_another_target_says_so(plan: Plan) -> None:
    older = dataclasses.replace(plan, versions={**plan.versions, "jax": "0.1.2"})
    note = optimize(step, plan=older).plan(PARAMS, X).note
    assert "jax 0.1.2" in note
    assert "remat_opt" not in note
    elsewhere = dataclasses.replace(plan, target="h200")
    assert "h200" in assert_still_right(elsewhere).note


def test_a_plan_with_a_missing_part_is_refused(plan: Plan) -> None:
    for part in set(json.loads(plan.to_json())) - {"schema"}:
        text = changed(plan, lambda document, part=part: document.pop(part))
        with pytest.raises(PlanError, match=rf"expected a whole plan.*{part}"):
            Plan.from_json(text)


# Edited by hand


def by_json(plan: Plan, saved: list[str]) -> Plan:
    return Plan.from_json(changed(plan, lambda document: document.update(saved=saved)))


def by_replace(plan: Plan, saved: list[str]) -> Plan:
    return dataclasses.replace(plan, saved=tuple(saved))


@pytest.mark.parametrize("edit", [by_json, by_replace])
def test_one_name_less_is_recomputed(plan: Plan, edit: Callable) -> None:
    for dropped in (plan.saved[0], plan.saved[-1]):
        edited = edit(plan, [name for name in plan.saved if name != dropped])
        assert edited.edited
        used = assert_still_right(edited)
        assert set(used.saved) == set(plan.saved) - {dropped}
        assert used.schedule != plan.schedule
        assert used.predicted.saved_bytes < plan.predicted.saved_bytes
        assert used.predicted.extra_seconds >= plan.predicted.extra_seconds
        assert (used.measured, used.edited) == (None, False)
        assert Plan.from_json(used.to_json()) == used


@pytest.mark.parametrize("edit", [by_json, by_replace])
def test_one_name_more_is_saved(plan: Plan, larger: Plan, edit: Callable) -> None:
    added = sorted(set(larger.saved) - set(plan.saved))[0]
    used = assert_still_right(edit(plan, [*plan.saved, added]))
    assert set(used.saved) == {*plan.saved, added}
    assert used.predicted.saved_bytes > plan.predicted.saved_bytes
    assert used.predicted.extra_seconds <= plan.predicted.extra_seconds


@pytest.mark.parametrize("edit", [by_json, by_replace])
def test_nothing_saved_and_the_names_of_another_plan_are_right_too(plan: Plan, larger: Plan, edit: Callable) -> None:
    assert assert_still_right(edit(plan, [])).saved == ()
    assert set(assert_still_right(edit(plan, list(larger.saved))).saved) == set(larger.saved)
    assert assert_still_right(edit(plan, [*reversed(plan.saved)])).schedule == plan.schedule  # no edit but in order


@pytest.mark.parametrize("edit", [by_json, by_replace])
def test_an_unknown_name_is_refused(plan: Plan, edit: Callable) -> None:
    for name in ("nobody/sin", f"{plan.saved[0]}#999", ""):
        with pytest.raises(PlanError, match="names of values") as error:
            optimize(step, plan=edit(plan, [*plan.saved, name])).plan(PARAMS, X)
        assert repr(name) in str(error.value)


# Fingerprints


def fingerprint_of(fun: Callable, *args: Any) -> str:
    return fingerprint(capture(jax.jit(fun), args, {}).program)


def test_a_fingerprint_heeds_no_lines_and_no_names() -> None:
    def one(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.relu(jax.lax.scan(lambda c, y: (jax.nn.silu(c + y), c * y), x[0], x)[1]))

    @jax.jit
    def inner(y: jax.Array) -> jax.Array:
        with jax.named_scope("scope"):
            return jax.nn.relu(y)

    def other(renamed: jax.Array) -> jax.Array:
        def body(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
            product = jax.named_call(lambda c: c + row, name="named")(carry)
            return jax.nn.silu(product), carry * row

        _, rows = jax.lax.scan(body, renamed[0], renamed)
        return jnp.sum(inner(rows))

    assert fingerprint_of(jax.grad(one), X) == fingerprint_of(jax.grad(other), X)
    assert fingerprint_of(one, X) != fingerprint_of(jax.grad(one), X)


def test_a_fingerprint_sees_shapes_dtypes_and_parameters() -> None:
    programs = [
        (lambda x: jnp.sum(x**2), X),
        (lambda x: jnp.sum(x**2), X[::2]),
        (lambda x: jnp.sum(x**2), X.astype(jnp.bfloat16)),
        (lambda x: jnp.sum(x**3), X),
        (lambda x: jax.lax.dot(x, x.T), X),
        (lambda x: jax.lax.dot(x, x.T, precision="highest"), X),
        (lambda x: jax.lax.scan(lambda c, y: (c + y, None), x[0], x)[0], X),
        (lambda x: jax.lax.scan(lambda c, y: (c * y, None), x[0], x)[0], X),
        (lambda x: jax.lax.scan(lambda c, y: (c * y, None), x[0], x, reverse=True)[0], X),
        (lambda x: jax.lax.scan(lambda c, y: (c * 2 + y, None), x[0], x)[0], X),
        (lambda x: jax.lax.scan(lambda c, y: (c * 3 + y, None), x[0], x)[0], X),
        (lambda x: jax.lax.sort(x, dimension=0), X),
        (lambda x: jax.lax.sort(x, dimension=1), X),
    ]
    assert len({fingerprint_of(fun, x) for fun, x in programs}) == len(programs)


def test_a_fingerprint_does_not_depend_on_the_order_of_sets() -> None:
    program = capture(jax.jit(lambda x: jnp.sin(x)), (jnp.ones(4),), {}).program
    names = [f"axis{i}" for i in range(50)]

    def with_parameter(value: Any) -> str:
        equation = dataclasses.replace(program.equations[0], params={"axes": value})
        return fingerprint(dataclasses.replace(program, equations=(equation,)))

    @dataclasses.dataclass
    class Policy:
        names: frozenset[str]

        def __call__(self, name: str) -> bool:
            return name in self.names

    for kind in (set, frozenset, dict.fromkeys, lambda names: ({"x": set(names)},), lambda x: Policy(frozenset(x))):
        assert with_parameter(kind(names)) == with_parameter(kind(names[::-1]))
        assert with_parameter(kind(names)) != with_parameter(kind(names[1:]))
