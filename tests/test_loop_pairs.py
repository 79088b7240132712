"""Which loops are pairs, and which must stay as they are."""

import jax
import jax.numpy as jnp
import loop_models as models
import numpy as np
import pytest
from jax import lax
from test_loops_values import captured

import remat_opt
from remat_opt.loops.pairs import EFFECTS, OFFLOADED, REFERENCES, find_pairs


def test_each_layer_of_a_stack_is_paired_with_its_own_backward_loop():
    found, _, _ = captured(models.stacked)
    pairs = find_pairs(found.program).pairs
    assert [pair.forward_index for pair in pairs] == sorted((pair.forward_index for pair in pairs), reverse=True)
    assert len({pair.forward_index for pair in pairs} | {pair.backward_index for pair in pairs}) == 6


def test_both_directions_of_a_bidirectional_network_are_paired():
    found, _, _ = captured(models.bidirectional)
    assert sorted(pair.forward.reverse for pair in find_pairs(found.program).pairs) == [False, True]


def test_what_somebody_else_reads_is_written_in_any_case():
    found, _, _ = captured(models.all_hidden)
    (pair,) = find_pairs(found.program).pairs
    assert len(pair.kept_ys) == 1
    assert pair.residual_ys


def with_effects():
    def body(w, h):
        jax.debug.print("{}", h[0, 0])
        return models.block(w, h)

    return models.over_layers(body)


def with_references():
    def step(state, x):
        seen = jax.new_ref(jnp.zeros(x.shape))

        def loss(p):
            def body(h, w):
                seen[...] = seen[...] + lax.stop_gradient(h)
                return models.block(w, h), None

            return (lax.scan(body, x, p)[0] ** 2).mean()

        gradients = jax.grad(loss)(state[0])
        return (jax.tree.map(lambda p, g: p - 0.1 * g, state[0], gradients),), seen[...]

    return step, ((models.layers(),), models.normal(8, models.BATCH, models.WIDTH))


def with_offloading():
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    return models.over_layers(jax.checkpoint(models.block, policy=policy))


def with_residuals_put_on_the_host():
    @jax.custom_vjp
    def cosine(x):
        return jnp.sin(x)

    def backward(x, g):
        return (g * jnp.cos(jax.device_put(x, jax.memory.Space.Device)),)

    cosine.defvjp(lambda x: (jnp.sin(x), jax.device_put(x, jax.memory.Space.Host)), backward)
    return models.over_layers(lambda w, h: models.block(w, cosine(h)))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (with_effects, EFFECTS),
        (with_references, REFERENCES),
        (with_offloading, OFFLOADED),
        (with_residuals_put_on_the_host, OFFLOADED),
    ],
)
def test_loops_that_must_stay_are_left_with_a_reason(model, reason):
    found, _, _ = captured(model)
    assert find_pairs(found.program).pairs == ()
    assert find_pairs(found.program).left == (reason,)


@pytest.mark.filterwarnings("ignore::remat_opt.RematWarning")  # one has something to gain from our order, one has not
@pytest.mark.parametrize("model", [with_effects, with_references])
def test_loops_that_must_stay_give_right_results(model, capfd):
    step, arguments = model()
    expected = jax.jit(step)(*arguments)
    found = remat_opt.optimize(step)(*arguments)
    jax.effects_barrier()
    jax.tree.map(np.testing.assert_array_equal, expected, found)
    printed = capfd.readouterr().out.splitlines()
    assert len(printed) == (2 * models.LENGTH if model is with_effects else 0)
