"""`largest_batch`: the batch fits by the real compilers, hardly more does, and bad input is refused."""

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_opt
import remat_opt.callable.planned
from remat_opt import InfeasibleBudget, LargestBatch
from remat_opt.callable.largest_batch import check_batch_settings
from remat_opt.targets import CompilationOutOfMemory, Figures, TargetUnavailable, remote, resolve_target

LAYERS, WIDTH = 3, 256
BUDGET = 200 * 10**6
STATE_BYTES = 4 * LAYERS * WIDTH * WIDTH


@jax.jit
def train_step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss(params: list[jax.Array]) -> jax.Array:
        hidden = x
        for weight in params:
            hidden = hidden + jnp.tanh(jnp.sin(hidden @ weight))
        return (hidden**2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return [weight - 0.1 * gradient for weight, gradient in zip(params, gradients, strict=True)], value


def one_layer(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    return train_step(params[:1], x)


def two_layers(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    return train_step(params[:2], x)


def make_args(batch: int, width: int = WIDTH) -> tuple[Any, ...]:
    weight = jax.ShapeDtypeStruct((width, width), jnp.float32)
    return [weight] * LAYERS, jax.ShapeDtypeStruct((batch, width), jnp.float32)


@functools.cache
def largest(budget: Any = BUDGET, target: Any = "cpu", multiple_of: Any = 256) -> LargestBatch:
    return remat_opt.largest_batch(train_step, make_args, budget, target, multiple_of, donate_argnums=0)


@pytest.mark.parametrize("target", [pytest.param("cpu", marks=pytest.mark.short), "h200"])
def test_the_batch_fits_and_hardly_more_does(target: str) -> None:
    found = largest(target=target)
    assert found.batch % 256 == 0
    assert found.compilations <= 4
    assert found.misses <= 2
    assert found.plan.target == target
    assert found.plain is not None
    assert found.batch >= 1.3 * found.plain.batch
    step = remat_opt.optimize(train_step, donate_argnums=0, target=target, plan=found.plan)
    compiled = remat_opt.measure(step, *make_args(found.batch)).optimized
    assert compiled is not None
    assert compiled.physical_peak_bytes == found.measured.physical_peak_bytes
    assert 0.93 * BUDGET < compiled.physical_peak_bytes <= BUDGET
    if target == "cpu":
        within = remat_opt.optimize(train_step, donate_argnums=0, target=target, budget=BUDGET, split=False)
        with pytest.raises(InfeasibleBudget):
            within.plan(*make_args(found.batch + 256 * round(0.1 * found.batch / 256)))


def test_the_batch_fits_a_tpu() -> None:
    """Of arrays that are larger than what lies on the chip."""
    budget = 600 * 10**6
    found = remat_opt.largest_batch(
        one_layer, lambda batch: make_args(batch, 512), budget, "v5e", multiple_of=8, donate_argnums=0
    )
    assert found.batch % 8 == 0
    assert found.compilations <= 4
    assert found.misses <= 2
    assert 0.93 * budget < found.measured.physical_peak_bytes <= budget
    assert "libtpu" in found.measured.compiler


def test_times_are_beside_it_and_the_fastest_batch_is_among_them() -> None:
    found = largest()
    assert found.plain is not None
    assert found.plain.plan.is_plain
    assert found.plain.extra_seconds == 0
    assert found.plain.peak_bytes <= BUDGET
    assert found.largest.extra_seconds > 0
    assert found.plain.batch <= found.fastest.batch <= found.batch
    assert found.fastest.samples_per_second >= max(found.plain.samples_per_second, found.largest.samples_per_second)
    plan = found.largest.plan.predicted
    assert found.largest.seconds == pytest.approx(plan.seconds + plan.extra_seconds)
    lines = str(found).splitlines()
    assert lines[0] == "train_step for cpu, budget 200.0 MB"
    assert lines[2].split() == ["batch", "peak", "extra", "time", "a", "step", "samples/s"]
    assert lines[5].split()[:2] == ["largest", f"{found.batch:,}"]
    assert "physical peak" in lines[7]
    assert json.loads(json.dumps(found.as_json()))["largest"]["batch"] == found.batch


def test_a_faster_batch_than_the_plain_steps_largest_is_found() -> None:
    """Of a step that reads its weights for few rows: more rows take hardly longer."""
    found = remat_opt.largest_batch(
        two_layers, lambda batch: make_args(batch, 2048), "87MB", "h200", multiple_of=16, donate_argnums=0
    )
    assert found.plain is not None
    assert found.plain.batch < found.fastest.batch < found.batch
    assert found.fastest.samples_per_second > 1.1 * found.plain.samples_per_second
    assert found.fastest.samples_per_second > 1.03 * found.largest.samples_per_second


def test_chunks_of_real_arrays() -> None:
    params = [jnp.zeros((WIDTH, WIDTH))] * 2
    found = remat_opt.largest_batch(
        two_layers, lambda batch: (params, jnp.zeros((batch, WIDTH))), 4 * 10**6, multiple_of=512, split="auto"
    )
    assert found.target == "cpu"
    assert found.plan.chunks > 1
    assert found.measured.physical_peak_bytes <= 4 * 10**6


def test_what_the_compiler_refuses_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a TPU's compiler does, which has less for a program than the device's memory."""
    limit, asked = 8 * BUDGET // 10, []
    compiling: Callable[..., Figures] = remat_opt.callable.planned.compile_as_called

    def refusing(*args: Any) -> Figures:
        figures = compiling(*args)
        asked.append(figures.physical_peak_bytes)
        if figures.physical_peak_bytes > limit:
            raise CompilationOutOfMemory("it does not fit", figures.physical_peak_bytes, limit)
        return figures

    monkeypatch.setattr(remat_opt.callable.planned, "compile_as_called", refusing)
    found = remat_opt.largest_batch(two_layers, make_args, BUDGET, multiple_of=256, donate_argnums=0)
    assert asked[0] > limit
    assert 0.9 * limit < found.measured.physical_peak_bytes <= limit
    assert found.compilations == len(asked) <= 4
    assert 1 <= found.misses <= 2


def test_the_default_budget_is_the_devices_memory() -> None:
    given = check_batch_settings(make_args, None, "h200", 8).budget
    assert given.physical_bytes == resolve_target("h200").memory_bytes


def test_a_budget_below_the_state_is_refused_with_what_it_needs() -> None:
    with pytest.raises(
        InfeasibleBudget, match=r"smallest batch of 256 fits, got 100000 .* for arguments and results"
    ) as e:
        largest(100_000)
    assert STATE_BYTES < e.value.least_bytes < 5 * STATE_BYTES


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": 0.5}, ValueError, r"expected a budget in bytes, .*got 0\.5"),
        ({"budget": "min"}, ValueError, "expected a budget in bytes, .*got 'min'"),
        ({"budget": None}, ValueError, "expected a budget in bytes, got None, and cpu has no memory of its own"),
        ({"budget": "20 bananas"}, ValueError, "expected a budget such as"),
        ({"multiple_of": 0}, ValueError, "whole number of at least 1, got 0"),
        ({"multiple_of": -8}, ValueError, "whole number of at least 1, got -8"),
        ({"multiple_of": 2.0}, ValueError, r"whole number of at least 1, got 2\.0"),
        ({"multiple_of": True}, ValueError, "whole number of at least 1, got True"),
        ({"target": "h300"}, ValueError, "unknown target 'h300'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        largest(**options)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (make_args(8), TypeError, "expected make_args to be a function of the batch size, got tuple"),
        (lambda batch: list(make_args(batch)), TypeError, r"make_args\(8\) to return .* a tuple, got list"),
        (lambda batch: make_args(64), ValueError, r"change with the batch, got the same for 8 and 16: \(256, 256\)"),
        (lambda batch: make_args(min(batch, 64)), ValueError, "expected memory that grows with the batch"),
        (lambda batch: make_args(batch)[: 1 + (batch < 9)], ValueError, "the same tree for every batch, got .* for 16"),
    ],
)  # fmt: skip
def test_arguments_that_are_no_batches_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        remat_opt.largest_batch(train_step, make, "20MB", "cpu", 8)


def test_a_target_that_is_not_installed_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_can_be_imported", lambda module: False)
    with pytest.raises(TargetUnavailable, match=r'pip install "remat_opt\[cuda-aot\]"'):
        remat_opt.largest_batch(train_step, lambda batch: pytest.fail("asked"), "20MB", "h200")
