"""What a step with rewritten loops is foreseen to need, against the real compilers."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import remat_opt
from remat_opt import optimize
from remat_opt.compilers.model import allocated_by, compiled
from remat_opt.graph.cost import Rates
from remat_opt.program.inline import inline
from remat_opt.targets.devices import resolve_target

LAYERS, WIDTH, ROWS, WORDS = 32, 128, 2048, 16384
LOGITS = 4 * ROWS * WORDS


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(state: Any, x: jax.Array, words: jax.Array) -> Any:
    """Layers in a loop, and behind them many words to choose from: most memory is needed between the two loops."""

    def loss(state: Any) -> jax.Array:
        def layer(hidden: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            up, down = weights
            return hidden + jax.nn.gelu(hidden @ up) @ down, None

        hidden, _ = lax.scan(layer, x, state["layers"])
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ state["head"].T, words).mean()

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, state, gradients), value


STATE = {
    "layers": (array(LAYERS, WIDTH, 4 * WIDTH), array(LAYERS, 4 * WIDTH, WIDTH)),
    "head": array(WORDS, WIDTH),
}
ARGS = STATE, array(ROWS, WIDTH), jax.ShapeDtypeStruct((ROWS,), jnp.int32)


@pytest.mark.parametrize("target", ["cpu", "h200", "v5e"])
def test_what_is_written_over_between_two_loops_is_counted_once(target: str) -> None:
    optimized = optimize(step, target=target, donate_argnums=0)
    plan = optimized.plan(*ARGS)
    assert plan.loops, "expected a pair of loops that is written again"
    measured = remat_opt.measure(optimized, *ARGS).optimized
    assert measured is not None
    assert plan.predicted.peak_bytes == pytest.approx(measured.temp_bytes, rel=0.15 if target == "v5e" else 0.05)
    assert target == "cpu" or measured.temp_bytes < 1.5 * LOGITS  # the gradient takes the place of the logits


@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_what_a_loop_begins_with_and_reads_in_each_turn_is_there_twice(target: str) -> None:
    """As where a fixed point is looked for from the cotangent that is added in each turn."""

    def solved(x: jax.Array, weights: jax.Array) -> jax.Array:
        given = jnp.cumsum(x, 1)
        return jax.lax.fori_loop(0, 8, lambda _, found: jnp.tanh(found @ weights) + given, given)

    args = array(4096, 512), array(512, 512)
    measured = remat_opt.measure(jax.jit(solved), *args, target=target).plain
    assert measured.temp_bytes > 2 * 4096 * 512 * 4
    resolved = resolve_target(target)
    program = inline(jax.make_jaxpr(solved)(*args), with_barriers=True, keep_names=False)
    graph = compiled(program, Rates(resolved.bandwidth, resolved.flops), platform=resolved.platform)
    assert allocated_by(graph, resolved.platform) == pytest.approx(measured.temp_bytes, rel=0.05)
