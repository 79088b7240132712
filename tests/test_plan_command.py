"""`python -m remat_opt plan`: what it prints, as text and as JSON, and what it answers to wrong usage."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from remat_opt import Plan
from remat_opt.__main__ import main
from remat_opt.targets import remote

HERE = "test_plan_command"
PARAMS = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 2
number = 7


def train_step(params: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    def loss(params: list[jax.Array]) -> jax.Array:
        hidden = x
        for weight in params:
            hidden = hidden + jnp.tanh(jnp.sin(hidden @ weight))
        return (hidden**2).mean()

    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, params, jax.grad(loss)(params))


def make_step(batch: int = 4096) -> tuple[Any, tuple]:
    return jax.jit(train_step, donate_argnums=0), (PARAMS, jax.ShapeDtypeStruct((batch, 128), jnp.float32))


def step_alone() -> Any:
    return train_step


def test_a_step_is_explained_measured_and_its_frontier_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{HERE}:make_step", "--target", "h200", "--budget", "12MB"]) == 0
    shown = capsys.readouterr().out
    assert 'Plan for target h200, solver auto, budget "12MB"' in shown
    assert "train_step for h200, jax" in shown
    assert "extra FLOPs  extra time" in shown
    assert "Largest batch" not in shown


def test_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{HERE}:make_step", "--target", "cpu", "--budget", "0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plain, ours = found["measured"]["plain"], found["measured"]["optimized"]
    assert ours["temp_bytes"] <= 0.5 * plain["temp_bytes"]
    assert ours["target"] == "cpu"
    plan = Plan.from_json(json.dumps(found["plan"]))
    assert plan.budget == 0.5
    assert "Plan for target cpu" in found["explanation"]
    peaks = [point["peak_bytes"] for point in found["frontier"]]
    assert peaks == sorted(peaks)
    assert found["largest_batch"] is None


def test_the_largest_batch_is_found_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--target", "cpu", "--budget", "12MB", "--largest-batch", "--multiple-of", "256", "--json"]
    assert main(["plan", f"{HERE}:make_step", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    largest = found["largest_batch"]
    assert largest["batch"] % 256 == 0
    assert 0.85 * 12e6 < largest["physical_peak_bytes"] <= 12e6
    assert found["plan"]["inputs"][-1] == f"float32[{largest['batch']}, 128]"
    ours = found["measured"]["optimized"]
    assert ours["temp_bytes"] + ours["argument_bytes"] + ours["output_bytes"] - ours["alias_bytes"] <= 12e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["make_step"], "expected package.module:function, got 'make_step'"),
        (["not_there.at_all:make_step"], "expected a module that can be imported from here, got 'not_there.at_all'"),
        ([f"{HERE}:made_step"], f"expected a function of {HERE}, got 'made_step'"),
        ([f"{HERE}:number"], "to be a function, got int"),
        ([f"{HERE}:step_alone"], "expected the function to return a step and a tuple of its arguments, got"),
        ([f"{HERE}:make_step", "--target", "h300"], "unknown target 'h300'"),
        ([f"{HERE}:make_step", "--budget", "much"], "12GiB"),
        ([f"{HERE}:make_step", "--multiple-of", "8"], "--multiple-of goes with --largest-batch"),
        ([f"{HERE}:make_step", "--largest-batch", "--multiple-of", "0"], "a whole number of at least 1, got '0'"),
        ([f"{HERE}:make_step", "--largest-batch", "--budget", "0.5"], "--largest-batch needs a budget in bytes"),
        ([f"{HERE}:make_step", "--largest-batch"], "--largest-batch needs a budget for cpu"),
    ],
)
def test_wrong_usage_says_what_is_expected(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_done_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["plan", f"{HERE}:make_step", "--target", "cpu", "--budget", "300kB"]) == 1
    assert "the budget cannot be kept: expected a budget of at least" in capsys.readouterr().err
    monkeypatch.setattr(remote, "_can_be_imported", lambda module: False)
    assert main(["plan", f"{HERE}:make_step", "--target", "v5e", "--budget", "12MB"]) == 1
    assert 'pip install "remat_opt[tpu-aot]"' in capsys.readouterr().err
