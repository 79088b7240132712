"""Values evicted one by one: each schedule is lower than the one before, is right, and costs what was allowed."""

import random

import jax
import jax.numpy as jnp
import pytest
from checks import by_jax
from random_graphs import training_graph
from step_graphs import graph_of
from step_networks import conv

from remat_opt.graph.build import build
from remat_opt.graph.cost import Rates
from remat_opt.graph.liveness import simulate
from remat_opt.graph.schedule import Run, join_runs
from remat_opt.search import Problem, search_of
from remat_opt.search.drop_recomputation import needed
from remat_opt.search.local_search import descend
from remat_opt.trace.inline import inline


@pytest.mark.parametrize("seed", range(12))
def test_each_schedule_is_no_higher_and_is_what_its_simulation_says(seed: int) -> None:
    problem = Problem(training_graph(random.Random(seed), 24))
    most = problem.graph.seconds / 4
    before = problem.plain
    found = list(descend(problem, before, lambda one: one.extra_seconds <= most))
    for one in found:
        assert one.peak <= before.peak
        assert one.peak == simulate(problem.graph, one.schedule).peak
        assert one.extra_seconds <= most
        before = one
    assert not found or found[-1].peak < problem.plain.peak


def test_repeats_that_nobody_needs_are_seen_in_a_simulation() -> None:
    """Where `has_unread_repeats` says no, `needed` has nothing to drop; a descent leaves nothing to drop."""
    seen = {True: 0, False: 0}
    for seed in range(12):
        problem = Problem(training_graph(random.Random(seed), 24))
        graph = problem.graph
        for one in descend(problem, problem.plain, lambda _: True):
            assert needed(graph, one.schedule.runs) == one.schedule
            for repeated in range(len(one.schedule.runs)):
                *before, run = one.schedule.runs[: repeated + 1]
                again = Run(run.ops[-1:], recomputed=True)
                if not all(graph.ops[op].repeatable for op in again.ops):
                    continue
                runs = [*before, run, again, *one.schedule.runs[repeated + 1 :]]
                drops = needed(graph, runs) != join_runs(runs)
                assert simulate(graph, join_runs(runs)).lives.has_unread_repeats >= drops
                seen[drops] += 1
    assert min(seen.values()) > 10


def test_a_network_gets_lower_than_its_segments() -> None:
    search = search_of(Problem(graph_of("resnet50")))
    assert search.minimum_memory.peak < by_jax(0.95, 1.0) * search.minimum_of_levels.peak
    assert search.is_one_pass(search.minimum_memory)


def test_the_search_for_a_tpu_knows_that_images_are_padded() -> None:
    def convolved(x, kernel):
        y = conv(x, kernel)
        return jnp.sin(y) * y

    x, kernel = jnp.zeros((8, 16, 16, 64)), jnp.zeros((3, 3, 64, 64))
    program = inline(jax.make_jaxpr(convolved)(x, kernel))
    rates = Rates(bandwidth=1e12, flops={"float32": 1e14})
    cpu, tpu = (max(build(program, rates, platform=platform).graph.sizes) for platform in ("cpu", "tpu"))
    assert tpu == 2 * cpu  # 64 of 128 lanes
