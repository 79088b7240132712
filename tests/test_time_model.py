"""Estimated seconds: of kernels one by one, and of steps that were timed on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import loop_models
import pytest
from jax import lax

from benchmarks import on_gpu, predicted_time
from benchmarks.results_file import load
from benchmarks.tables import TABLES
from remat_opt.graph.build import build
from remat_opt.graph.cost import LONG_PRODUCT_SHARE, Rates, kernel_seconds, product_seconds
from remat_opt.graph.graph import Graph
from remat_opt.loops.options import pair_options
from remat_opt.loops.pairs import find_pairs
from remat_opt.loops.rewrite import rewrite_loops
from remat_opt.planner.loop_search import SearchedSteps
from remat_opt.trace.inline import inline

GPU = Rates(bandwidth=1e12, flops={"float32": 1e14}, kernel_seconds=2e-6, multiprocessors=100)
IDEAL = dataclasses.replace(GPU, kernel_seconds=0.0, multiprocessors=0)
ROWS = {row.key: row for row in TABLES["feng_huang"]}


def graph_of(fun: Callable, *args: Any) -> Graph:
    return build(inline(jax.make_jaxpr(fun)(*args)), IDEAL).graph


def seconds_of(rows: int, length: int, columns: int, rates: Rates = GPU) -> float:
    return product_seconds(2.0 * rows * length * columns, rows * columns, "float32", rates)


@pytest.mark.short
def test_a_kernel_takes_its_arithmetic_or_its_traffic_or_its_start() -> None:
    assert kernel_seconds(0.0, 8, GPU) == GPU.kernel_seconds
    assert kernel_seconds(1e-3, 8, GPU) == 1e-3
    assert kernel_seconds(0.0, 10**9, IDEAL) == 1e-3
    assert kernel_seconds(0.0, 10**9, GPU) > 1e-3


@pytest.mark.short
def test_products_that_fill_part_of_the_device_are_slower() -> None:
    large = seconds_of(8192, 512, 8192)
    assert large == pytest.approx(seconds_of(8192, 512, 8192, IDEAL) / 0.6)
    part = seconds_of(128, 100, 128)  # that of one multiprocessor
    assert part == pytest.approx(100 * seconds_of(8192, 100, 8192) / 64**2)
    assert part == pytest.approx(seconds_of(64, 100, 64))  # of fewer FLOPs
    assert seconds_of(1280, 100, 1280) == pytest.approx(part)  # on all of them


@pytest.mark.short
def test_gradients_of_weights_run_at_a_lower_rate() -> None:
    wide, long = seconds_of(8192, 1024, 1024), seconds_of(1024, 8192, 1024)
    assert long == pytest.approx(wide / LONG_PRODUCT_SHARE)


@pytest.mark.short
def test_a_kernel_moves_what_its_fused_arithmetic_is_made_of_once() -> None:
    x, y = jnp.ones((100, 100)), jnp.ones((100, 100))
    (total,) = [op.traffic for op in graph_of(lambda x, y: jnp.sum(jnp.sin(x) * y + x), x, y).ops if op.name != "add"]
    assert total == 2 * x.nbytes + 4


@pytest.mark.short
def test_of_a_slice_a_kernel_moves_that_part_alone() -> None:
    stack = jnp.ones((1000, 64))
    sliced = graph_of(lambda stack, at: jnp.sin(lax.dynamic_slice_in_dim(stack, at, 2)), stack, 3)
    assert sliced.ops[-1].traffic <= 2 * (2 * 64 * 4) + 16
    halves = graph_of(lambda stack: jnp.sin(stack[:500]) + stack[500:], stack)
    assert halves.ops[-1].traffic == stack.nbytes + stack.nbytes // 2
    rows = graph_of(lambda stack, at: stack[at], stack, jnp.arange(3))
    assert rows.seconds <= 4 * (3 * 64 * 4) / IDEAL.bandwidth


@pytest.mark.parametrize("network", ["alexnet", "vgg16"])
def test_predicted_times_are_near_those_of_steps_that_ran_on_a_gpu(network: str) -> None:
    known = load(on_gpu.FILE)[network]
    found = {
        variant: predicted_time.predicted(ROWS[network], variant, known) for variant in ("nn.remat", "dots_saveable")
    }
    times = predicted_time.times_of(known, found)
    assert len(times) == 2
    assert all(abs(one.error) < 0.05 for one in times)
    assert predicted_time.is_in_order(*times)
    plain = predicted_time.seconds_as_written(ROWS[network], "plain")
    assert 0.7 < (predicted_time.measured_seconds(known["plain"]) or 0.0) / plain < 1.4


@pytest.mark.parametrize("model", ["layers", "long_lstm", "masked"])
def test_a_loop_takes_the_seconds_of_what_is_written(model: str) -> None:
    mask = functools.partial(jnp.tril, jnp.ones((loop_models.BATCH, loop_models.WIDTH)))
    step, arguments = {
        "layers": lambda: loop_models.over_layers(loop_models.block),
        "long_lstm": lambda: loop_models.long_lstm(24),
        "masked": lambda: loop_models.over_layers(lambda w, h: jnp.where(mask() > 0, loop_models.block(w, h), h)),
    }[model]()
    program = inline(jax.make_jaxpr(step)(*arguments))
    (pair,) = find_pairs(program).pairs
    rates = dataclasses.replace(GPU, kernel_seconds=1e-9, bandwidth=1e9)  # so that bytes count
    steps = SearchedSteps(rates, "cuda")
    options = pair_options(program, pair, rates, None, steps)
    plain = build(program, rates, platform="cuda").graph.seconds
    levels = {1: 0, 2: 0}
    for option in options.options[1:]:
        assert option.choice is not None
        written = rewrite_loops(program, [pair], [(0, option.choice)], steps=steps, rates=rates)
        extra = build(written, rates, platform="cuda").graph.seconds - plain
        in_chunks = option.choice.chunk is not None
        assert option.extra_seconds == pytest.approx(extra, abs=(0.05 if in_chunks else 1e-6) * options.seconds)
        levels[1 + in_chunks] += 1
    assert all(levels.values())
