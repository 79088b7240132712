"""Files of plans: whatever a file holds, the step is right or the error says what to do; and plans of many at once."""

import contextlib
import copy
import dataclasses
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from checks import assert_close
from step_networks import sine_arguments
from step_networks import sine_step as step

from remat_opt import Plan, PlanError, RematWarning, optimize
from remat_opt.planner.plan import SCHEMA

pytestmark = pytest.mark.short

PARAMS, X = sine_arguments(width=16, layers=6, batch=128)


def assert_right(found: Any, x: jax.Array = X) -> None:
    assert_close(found, jax.jit(step)(PARAMS, x), atol=1e-7)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return optimize(step, budget=0.7).plan(PARAMS, X)


# Damaged files


def test_a_file_cut_at_any_byte_is_refused(plan: Plan, tmp_path: Path) -> None:
    whole = plan.to_json().encode()
    path = tmp_path / "plan.json"
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(PlanError, match=r"expected .*[Pp]lan again with step\.plan"):
            Plan.load(path)
    path.write_bytes(whole)
    assert Plan.load(path) == plan


def test_a_file_with_a_byte_changed_is_refused_or_says_the_same_or_is_another_plan(plan: Plan, tmp_path: Path) -> None:
    source, whole = random.Random(0), plan.to_json().encode()
    path = tmp_path / "plan.json"
    for _ in range(300):
        at = source.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([source.randrange(256)]) + whole[at + 1 :])
        try:
            found = Plan.load(path)
        except PlanError:
            continue
        assert found.schedule == plan.schedule  # it has a digest of its own
        assert found.choice == plan.choice


GARBAGE = {
    "nothing": b"",
    "zeros": b"\0" * 1000,
    "noise": random.Random(1).randbytes(1000),
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "UTF-16": '{"schema": 2}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "a number": b"3",
    "text": b'"plan"',
    "infinity": b"Infinity",
    "true": b"true",
    "a list": b"[1, 2]",
    "many digits": b"1" * 10_000,
    "deep": b"[" * 100_000,
    "deep and closed": b"[" * 100_000 + b"]" * 100_000,
    "another document": b'{"schema": "plan", "version": 3}',
    "a schema and no more": b'{"schema": 2}',
    "the same name twice": b'{"schema": 2, "schema": 3}',
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_a_file_of_something_else_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError, match="expected"):
        Plan.load(tmp_path / "plan.json")


def test_a_file_of_more_or_of_another_schema_is_refused(plan: Plan) -> None:
    text = plan.to_json()
    for other in (text + text, f"[{text}]", text.replace(f'"schema": {SCHEMA}', f'"schema": {SCHEMA + 1}')):
        with pytest.raises(PlanError, match=r"expected .*[Pp]lan again with step\.plan"):
            Plan.from_json(other)


def test_a_file_that_is_not_there_is_an_error_of_the_file_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "plan.json")


def places(document: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths to the parts of a document; of long lists to the first part only."""
    yield path
    first = document[:1] if isinstance(document, list) else ()
    for key, child in document.items() if isinstance(document, dict) else enumerate(first):
        yield from places(child, (*path, key))


def with_part(document: Any, path: tuple, part: Any) -> Any:
    changed = copy.deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = part
    return changed


@pytest.mark.parametrize("part", [None, -1, 10**30, 0.5, "text", [], {}, [None], True], ids=repr)
def test_a_part_that_is_something_else_is_refused_or_makes_no_difference(plan: Plan, part: Any) -> None:
    """Whatever part of the text it is; what is not looked at is not missed."""
    document = json.loads(plan.to_json())
    for path in places(document):
        if not path:
            continue
        with warnings.catch_warnings(), contextlib.suppress(PlanError):
            warnings.simplefilter("ignore", RematWarning)
            changed = Plan.from_json(json.dumps(with_part(document, path, part)))
            optimized = optimize(step, plan=changed)
            used = optimized.plan(PARAMS, X)
            str(optimized.explain(PARAMS, X))
            assert used.schedule == plan.schedule or changed.edited, path


# Plans from elsewhere


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"versions": {"remat_opt": "0.0.1", "jax": "0.1.2", "jaxlib": "0.1.3"}}, "jax 0.1.2, jaxlib 0.1.3"),
        ({"target": "h200"}, "target h200"),
        ({"target": "a device of next year"}, "target a device of next year"),
    ],
)
def test_a_plan_from_elsewhere_works_and_says_where_its_figures_are_from(plan: Plan, change: dict, said: str) -> None:
    optimized = optimize(step, plan=dataclasses.replace(plan, **change))
    with pytest.warns(RematWarning, match=rf"planned with .*{said}.*not checked here") as caught:
        assert_right(optimized(PARAMS, X))
    assert len(caught) == 1
    assert said in optimized.plan(PARAMS, X).note
    assert said in " ".join(str(optimized.explain(PARAMS, X)).split())


def test_a_plan_of_here_is_used_without_a_word(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_right(optimize(step, plan=Plan.load(tmp_path / "plan.json"))(PARAMS, X))


def test_a_plan_that_does_not_fit_may_fall_back(plan: Plan) -> None:
    optimized = optimize(step, plan=plan, on_error="plain")
    with pytest.warns(RematWarning, match="for another"):
        assert_right(optimized(PARAMS, X[::2]), X[::2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_right(optimized(PARAMS, X))
    assert not optimized.plan(PARAMS, X).is_plain


# Many at once


def test_each_shape_has_a_plan_of_its_own(tmp_path: Path) -> None:
    optimized = optimize(step)
    for batch in (X, X[::2]):
        assert_right(optimized(PARAMS, batch), batch)
    plans = [optimized.plan(PARAMS, batch) for batch in (X, X[::2])]
    assert plans[0].fingerprint != plans[1].fingerprint
    for batch, one, other in ((X, *plans), (X[::2], *plans[::-1])):
        assert_right(optimize(step, plan=one)(PARAMS, batch), batch)
        with pytest.raises(PlanError, match="for another"):
            optimize(step, plan=other)(PARAMS, batch)


def test_a_plan_remembers_that_weights_are_gathered_once(plan: Plan) -> None:
    once = dataclasses.replace(plan, gathers_once=True)
    assert Plan.from_json(once.to_json()) == once
    document = json.loads(once.to_json())
    del document["gathers_once"]
    with pytest.raises(PlanError, match="edited"):
        Plan.from_json(json.dumps(document))
