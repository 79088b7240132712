"""Losses between samples, in chunks: later loops make the rows of earlier ones again, as GradCache does by hand."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from split_checks import assert_all_close

import remat_opt
from remat_opt.rewrites.split.batch import Batch, batch_along
from remat_opt.rewrites.split.stages import making_rows_again
from remat_opt.trace.flops import flops_of

ROWS, TOKENS, WIDTH, LAYERS = 60, 16, 16, 2


def encode(weights: Any, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A residual network with dropout, its layers a loop, with a penalty that sums over the batch."""

    def layer(h: jax.Array, given: Any) -> tuple[jax.Array, jax.Array]:
        (up, down), key = given
        hidden = jnp.tanh((h + h.mean(1, keepdims=True)) @ up)
        hidden = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden / 0.9, 0.0)
        h = h + hidden @ down
        return h, jnp.mean(h**2)

    h, penalties = jax.lax.scan(layer, x, (weights, jax.random.split(key, LAYERS)))
    return h.mean(1), penalties.sum()


def written_out(weights: Any, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same without the loop and the penalty."""
    for at in range(LAYERS):
        hidden = jnp.tanh((x + x.mean(1, keepdims=True)) @ weights[0][at])
        mask = jax.random.bernoulli(jax.random.fold_in(key, at), 0.9, hidden.shape)
        x = x + jnp.where(mask, hidden / 0.9, 0.0) @ weights[1][at]
    return x.mean(1), jnp.zeros(())


def contrastive(one: jax.Array, other: jax.Array) -> jax.Array:
    """Each image against the texts of all others (Radford et al., arXiv 2103.00020)."""
    scores = one @ other.T
    return jnp.mean(jax.nn.logsumexp(scores, 1) - jnp.diag(scores))


def decorrelated(one: jax.Array, other: jax.Array) -> jax.Array:
    """Correlations over the batch (Zbontar et al., arXiv 2103.03230)."""
    one, other = ((z - z.mean(0)) / (z.std(0) + 1e-2) for z in (one, other))
    return jnp.mean((one.T @ other / len(one) - jnp.eye(one.shape[1])) ** 2)


LOSSES = {"contrastive": contrastive, "decorrelated": decorrelated}
ENCODERS = {"loop": encode, "written out": written_out}


def step_of(encoder: Any, between: Any) -> Any:
    def step(params: Any, images: jax.Array, texts: jax.Array, key: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            (one, p), (other, q) = (
                encoder(params[0], images, key),
                encoder(params[1], texts, jax.random.fold_in(key, 9)),
            )
            return between(one, other) + 0.1 * (p + q)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    return step


def arguments(dtype: Any = jnp.float32, rows: int = ROWS, tokens: int = TOKENS, width: int = WIDTH) -> tuple:
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = [(LAYERS, width, 4 * width), (LAYERS, 4 * width, width)] * 2
    up, down, above, below = (
        jax.random.normal(key, shape, dtype) / 4 for key, shape in zip(keys, shapes, strict=False)
    )
    images, texts = (jax.random.normal(key, (rows, tokens, width), dtype) for key in keys[4:])
    return ((up, down), (above, below)), images, texts, jax.random.key(1)


def batch_of(step: Any, *args: Any) -> Batch:
    batch = remat_opt.optimize(step).prepare(*args).batch
    assert batch is not None
    return batch


@pytest.mark.parametrize(
    ("encoder", "between", "chunks"),
    [("loop", "contrastive", ROWS), ("loop", "decorrelated", 2), *(("written out", between, 5) for between in LOSSES)],
)
def test_values(encoder: str, between: str, chunks: int) -> None:
    step = step_of(ENCODERS[encoder], LOSSES[between])
    with jax.enable_x64(True):
        args = arguments(jnp.float64)
        assert any(batch_of(step, *args).stages.again)
        split = remat_opt.optimize(step, split=chunks, verify=False)
        assert_all_close(*(jax.tree.leaves(one(*args)) for one in (split, step)))


@pytest.mark.short
def test_a_contrastive_step_needs_a_chunk_of_its_memory() -> None:
    args = jax.eval_shape(lambda: arguments(rows=512, tokens=64, width=32))
    step = jax.jit(step_of(written_out, contrastive), donate_argnums=0)
    found = remat_opt.measure(remat_opt.optimize(step, split=16, target="h200"), *args)
    assert found.plain is not None
    assert found.optimized is not None
    assert found.optimized.temp_bytes < 0.137 * found.plain.temp_bytes
    predicted = found.plan.predicted
    assert 0.3 < predicted.extra_flops / predicted.flops < 0.4  # one more forward pass, with its random masks
    assert "runs in 16 chunks" in found.plan.note


def test_only_what_leads_to_rows_runs_again() -> None:
    args = arguments()
    step = step_of(written_out, contrastive)
    batch = batch_of(step, *args)
    stages, program = batch.stages, batch.program
    again = frozenset().union(*stages.again)
    products = [at for at in again if program.equations[at].primitive.name == "dot_general"]
    assert 2 * LAYERS <= len(products) <= 2 * 2 * LAYERS - 2  # the last ones lead to the embeddings alone
    assert all(stages.stage[at] < loop for loop, one in enumerate(stages.again, 1) for at in one)
    before = dataclasses.replace(stages, again=())
    assert stages.handed_on_bytes < 0.2 * before.handed_on_bytes


def test_layers_that_each_need_the_whole_batch_do_not_run_again_for_one_another() -> None:
    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        def loss(weights: jax.Array) -> jax.Array:
            h = x
            for w in weights:
                h = jnp.tanh(h @ w)
                h = (h - h.mean(0)) / (h.std(0) + 1e-2)
            return jnp.mean(h[:, 0] ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    prepared = remat_opt.optimize(step).prepare(jnp.ones((8, WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH)))
    program = prepared.captured.program
    stages = batch_along(program, 1, 0).stages
    assert stages.loops > 8
    assert stages.handed_on_bytes > 0.2 * stages.held_bytes(1)
    flops = sum(flops_of(equation, program) for equation in program.equations)
    assert making_rows_again(stages, 0.5 * flops) is stages
    assert sum(map(len, making_rows_again(stages, math.inf).again)) > len(program.equations)


def test_a_plan_of_it_is_used_again(tmp_path: Any) -> None:
    args = arguments()
    step = step_of(encode, contrastive)
    plan = remat_opt.optimize(step, split=3, verify=False).plan(*args)
    plan.save(tmp_path / "plan.json")
    loaded = remat_opt.optimize(step, plan=remat_opt.Plan.load(tmp_path / "plan.json"))
    for one, other in zip(jax.tree.leaves(loaded(*args)), jax.tree.leaves(step(*args)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
