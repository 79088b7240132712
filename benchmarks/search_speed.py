"""How long the search takes, from a step's graph to the whole frontier of memory and time.

    python -m benchmarks.search_speed [networks] [growth]

`networks`: DenseNet-201, for which Feng & Huang's own solver takes 184 s on their graph of 506 vertices, and the
1,000-layer ResNet of Chen et al. `growth`: steps of one residual network from 1,000 to 100,000 equations, with the
exponent of growth from each to the next. Seconds are those of this process's CPU, so that a busy machine changes them
less.
"""

from __future__ import annotations

import argparse
import math
import time

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from remat_opt.examples import make_example
from remat_opt.graph.build import build
from remat_opt.graph.graph import Graph
from remat_opt.planner.prepared import rates_of
from remat_opt.search import Problem, feng_huang, search_of
from remat_opt.targets import resolve_target
from remat_opt.trace.inline import inline

DEPTHS = (22, 70, 222, 700, 2220)


def graph_of(step, arguments) -> tuple[Graph, int]:
    """The graph of a step with an H200's costs, its state donated, and the number of its equations."""
    traced = jax.jit(step, donate_argnums=0).trace(*arguments)
    program = inline(traced.jaxpr)
    target = resolve_target("h200")
    donated = tuple(leaf.donated for leaf in jax.tree.leaves(traced.args_info))
    return build(program, rates_of(target), donated).graph, len(program.equations)


def frontier_seconds(graph: Graph) -> tuple[float, str]:
    """Seconds to the whole frontier, and where it begins and ends."""
    started = time.process_time()
    frontier = search_of(Problem(graph)).frontier
    seconds = time.process_time() - started
    return seconds, f"{frontier[0].peak / 1e6:.0f} … {frontier[-1].peak / 1e6:.0f} MB"


def residual_network(layers: int):
    """A residual network of two products a layer, and its arguments."""

    def loss(layers, images):
        for widen, narrow, scale in layers:
            images = images + jax.nn.gelu(images * scale @ widen) @ narrow
        return jnp.mean(images**2)

    def step(layers, images):
        gradients = jax.grad(loss)(layers, images)
        return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, layers, gradients)

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    return step, ([(shape(64, 128), shape(128, 64), shape(64)) for _ in range(layers)], shape(4096, 64))


def networks(console: Console) -> None:
    table = Table(title="from graph to frontier")
    for column in ("network", "equations", "ops", "seconds", "frontier", "Feng & Huang, ours", "theirs"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for name, batch, size, theirs in (("densenet201", 16, 224, "184 s"), ("resnet1001", 32, 224, "–")):
        example = make_example(name, batch=batch, size=size)
        graph, equations = graph_of(example.train_step, example.abstract_args)
        seconds, ends = frontier_seconds(graph)
        started = time.process_time()
        feng_huang.solve(Problem(graph), None)
        ours = time.process_time() - started
        table.add_row(name, f"{equations}", f"{len(graph.ops)}", f"{seconds:.1f}", ends, f"{ours:.1f} s", theirs)
    console.print(table)


def growth(console: Console) -> None:
    table = Table(title="growth with the size of the step")
    for column in ("layers", "equations", "ops", "seconds", "exponent"):
        table.add_column(column, justify="right")
    before: tuple[int, float] | None = None
    first: tuple[int, float] | None = None
    for depth in DEPTHS:
        graph, equations = graph_of(*residual_network(depth))
        seconds, _ = frontier_seconds(graph)
        exponent = _exponent(before, (equations, seconds))
        table.add_row(f"{depth}", f"{equations}", f"{len(graph.ops)}", f"{seconds:.1f}", exponent)
        before = equations, seconds
        first = first or before
    console.print(table)
    console.print(f"from the smallest to the largest: n^{_exponent(first, before)}")


def _exponent(smaller: tuple[int, float] | None, larger: tuple[int, float] | None) -> str:
    if smaller is None or larger is None:
        return "–"
    return f"{math.log(larger[1] / smaller[1]) / math.log(larger[0] / smaller[0]):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help="networks, growth (both where none is named)")
    parts = parser.parse_args().parts or ["networks", "growth"]
    for part in parts:
        {"networks": networks, "growth": growth}[part](Console())


if __name__ == "__main__":
    main()
