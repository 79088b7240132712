"""What a call of an optimised step costs beyond a call of the plain jitted one, on a state of 429 small arrays.

    python -m benchmarks.call_overhead

Both compute next to nothing, so that a call is mostly what JAX and we do around it. Plain and optimised calls take
turns. Other processes can only make a call longer, so each function's figure is what the fastest twentieth of its calls
took at most. Time is that of the calling thread on its core; a call does not wait for anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import remat_opt

LEAVES = 429
CALLS = 800  # of each function
WIDTH, ROWS = 16, 8  # a small program runs in the calling thread, and is part of the figure


def new_state() -> dict[str, jax.Array]:
    """As many arrays as a ResNet-50 has with its momentum and statistics; the names sort as they count."""
    return {f"leaf{index:03}": jnp.full((WIDTH,), 1e-3) for index in range(LEAVES)}


def step(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """A training step of a few of the arrays, with something to recompute; the others are handed on, changed."""
    used = [f"leaf{index:03}" for index in range(6)]

    def loss(weights: list[jax.Array]) -> jax.Array:
        hidden = x
        for weight in weights:
            hidden = jnp.tanh(jnp.sin(hidden) * weight) @ jnp.eye(WIDTH)
        return jnp.mean(hidden**2)

    value, gradients = jax.value_and_grad(loss)([state[name] for name in used])
    changed = {name: leaf * 0.999 for name, leaf in state.items()}
    changed |= {name: state[name] - 0.1 * gradient for name, gradient in zip(used, gradients, strict=True)}
    return changed, value


def functions() -> tuple[Callable, Callable]:
    """The step jitted and optimised, compiled; the second one recomputes."""
    state, x = new_state(), jnp.ones((ROWS, WIDTH))
    plain, optimized = jax.jit(step), remat_opt.optimize(step)
    if optimized.plan(state, x).is_plain:
        raise ValueError("expected a step that is rewritten, this one runs as it was given: change `step`")
    for function in (plain, optimized):
        jax.block_until_ready(function(state, x))
    return plain, optimized


def seconds_of_a_call(function: Callable, state: Any, x: jax.Array) -> float:
    """From the call to the return; what was started is waited for afterwards."""
    started = time.thread_time()
    results = function(state, x)
    seconds = time.thread_time() - started
    jax.block_until_ready(results)
    return seconds


def overhead_seconds() -> tuple[float, float]:
    """Seconds that a call takes longer when the step is optimised, and those of a plain call."""
    both = functions()
    state, x = new_state(), jnp.ones((ROWS, WIDTH))
    turns = [[seconds_of_a_call(function, state, x) for function in both] for _ in range(CALLS)]
    plain, optimized = (sorted(calls)[CALLS // 20] for calls in zip(*turns, strict=True))
    return optimized - plain, plain


def main() -> None:
    overhead, plain = overhead_seconds()
    print(f"a call with {LEAVES} arrays of state: {1e6 * plain:.0f} µs plain, {1e6 * overhead:+.1f} µs when optimised")


if __name__ == "__main__":
    main()
