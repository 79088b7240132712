"""Small training steps with loops in all forms that `scan` takes in real programs; each is (step, arguments).

The first argument of a step is its state: parameters and optimizer state.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax
from loop_kernels import attention, clipped, kernel_tanh

LENGTH, BATCH, WIDTH = 8, 2, 4


def normal(seed, *shape, dtype=jnp.float32):
    return (0.5 * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def step_of(loss, params, *data, tx=None):
    tx = tx or optax.sgd(0.1, momentum=0.9)

    def step(state, *data):
        params, opt_state = state
        value, gradients = jax.value_and_grad(loss)(params, *data)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step, ((params, tx.init(params)), *data)


def sequence():
    return normal(9, LENGTH, BATCH, WIDTH)


def rnn_params(seed=0, inputs=WIDTH):
    return {"wx": normal(seed, inputs, WIDTH), "wh": normal(seed + 1, WIDTH, WIDTH), "b": normal(seed + 2, WIDTH)}


def rnn_cell(p, h, x):
    return jnp.tanh(x @ p["wx"] + h @ p["wh"] + p["b"])


def rnn(p, xs, **options):
    def body(h, x):
        h = rnn_cell(p, h, x)
        return h, h

    return lax.scan(body, jnp.zeros(xs.shape[1:]), xs, **options)


def layers(seed=0):
    return {"w1": normal(seed, LENGTH, WIDTH, 2 * WIDTH), "w2": normal(seed + 1, LENGTH, 2 * WIDTH, WIDTH)}


def block(w, h):
    return h + jnp.tanh(h @ w["w1"]) @ w["w2"]


def loss_of_layers(body):
    return lambda p, x: (lax.scan(lambda h, w: (body(w, h), None), x, p)[0] ** 2).mean()


def over_layers(body, params=None, tx=None):
    """A scan over stacked weights whose body is `body(weights, h)`."""

    return step_of(loss_of_layers(body), params or layers(), normal(8, BATCH, WIDTH), tx=tx)


def last_hidden(**options):
    return step_of(lambda p, xs: (rnn(p, xs, **options)[0] ** 2).mean(), rnn_params(), sequence())


def all_hidden():
    return step_of(lambda p, xs: (rnn(p, xs)[1] ** 3).mean(), rnn_params(), sequence())


def lstm():
    return long_lstm(LENGTH, WIDTH, BATCH)


def long_lstm(length, width=32, batch=8):
    """Adam on the last state of a recurrent network of any length."""
    params = {"w": normal(0, 2 * width, 4 * width), "b": jnp.zeros(4 * width)}
    tx = optax.adam(1e-2)

    def loss(p, xs):
        def body(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ p["w"] + p["b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zero = jnp.zeros((batch, width))
        return (lax.scan(body, (zero, zero), xs)[0][0] ** 2).mean()

    return step_of(loss, params, normal(3, length, batch, width), tx=tx)


def stacked():
    def loss(p, xs):
        for layer in p:
            xs = rnn(layer, xs)[1]
        return (xs[-1] ** 2).mean()

    return step_of(loss, [rnn_params(0), rnn_params(3), rnn_params(6)], sequence())


def bidirectional():
    def loss(p, xs):
        both = jnp.concatenate([rnn(p["there"], xs)[1], rnn(p["back"], xs, reverse=True)[1]], -1)
        return (both**2).mean()

    return step_of(loss, {"there": rnn_params(0), "back": rnn_params(3)}, sequence())


def encoder_decoder():
    def loss(p, xs):
        state, _ = rnn(p, xs)

        def body(h, _):
            return rnn_cell(p, h, h), h

        _, ys = lax.scan(body, state, None, length=5)
        return (ys**2).mean()

    return step_of(loss, rnn_params(), sequence())


def nested():
    def loss(p, xs):
        def outer(h, x):
            def inner(h, _):
                return rnn_cell(p, h, x), None

            h, _ = lax.scan(inner, h, None, length=3)
            return h, h.sum()

        h, sums = lax.scan(outer, jnp.zeros((BATCH, WIDTH)), xs)
        return (h**2).mean() + (sums**2).mean()

    return step_of(loss, rnn_params(), sequence())


def dropout_keys():
    def loss(p, x, key):
        def body(h, pair):
            w, key = pair
            mask = jax.random.bernoulli(key, 0.8, h.shape)
            return jnp.where(mask, block(w, h), 0.0), None

        h, _ = lax.scan(body, x, (p, jax.random.split(key, LENGTH)))
        return (h**2).mean()

    return step_of(loss, layers(), normal(8, BATCH, WIDTH), jax.random.key(3))


def key_in_carry():
    def loss(p, x, key):
        def body(carry, w):
            h, key = carry
            key, own = jax.random.split(key)
            return (block(w, h) * jax.random.bernoulli(own, 0.8, h.shape), key), None

        (h, _), _ = lax.scan(body, (x, key), p)
        return (h**2).mean()

    return step_of(loss, layers(), normal(8, BATCH, WIDTH), jax.random.key(3))


def raw_key_in_carry():
    step, (state, x, _) = key_in_carry()
    return step, (state, x, jax.random.PRNGKey(3))


def integer_carry():
    def loss(p, table, xs):
        def body(carry, x):
            h, i = carry
            h = rnn_cell(p, h, x) * table[i % 3]
            return (h, i + 1), i

        (h, _), numbers = lax.scan(body, (jnp.zeros((BATCH, WIDTH)), 0), xs)
        return (h**2).mean() + numbers.sum()

    return step_of(loss, rnn_params(), normal(5, 3, WIDTH), sequence())


def scanned_cond():
    def loss(p, x, flags):
        def body(h, pair):
            w, flag = pair
            return lax.cond(flag, lambda h: block(w, h), lambda h: h * 0.9, h), None

        h, _ = lax.scan(body, x, (p, flags))
        return (h**2).mean()

    return step_of(loss, layers(), normal(8, BATCH, WIDTH), jnp.arange(LENGTH) % 3 != 1)


def checkpoint_inside():
    inner = jax.checkpoint(lambda w, h: jnp.tanh(h @ w["w1"]) @ w["w2"])
    return over_layers(lambda w, h: jnp.sin(h + inner(w, h)))


def checkpoint_with_policy():
    policy = jax.checkpoint_policies.dots_saveable
    return over_layers(jax.checkpoint(lambda w, h: block(w, jnp.sin(h)), policy=policy))


def flash_attention():
    return over_layers(lambda w, h: block(w, attention(h, jnp.sin(h), jnp.cos(h))))


def pallas_kernel():
    return over_layers(lambda w, h: block(w, kernel_tanh(h)))


def fft_and_sort():
    return over_layers(lambda w, h: block(w, jnp.fft.irfft(jnp.fft.rfft(jnp.sort(h, -1)) * 0.9, n=WIDTH)))


def linear_algebra():
    def body(w, h):
        matrix = w["w2"].T @ w["w2"] + jnp.eye(WIDTH)
        return h + jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(matrix), h.T).T

    return over_layers(body)


def while_inside():
    def body(w, h):
        steps = lax.while_loop(lambda n: n < 3, lambda n: n + 1, jnp.int32(h[0, 0] > 0))
        return block(w, h) * (0.9 + 0.01 * steps)

    return over_layers(body)


def length_one():
    params = jax.tree.map(lambda a: a[:1], layers())
    return over_layers(block, params)


def mixed_precision():
    def loss(p, x):
        p = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)
        h, _ = lax.scan(lambda h, w: (block(w, h), None), x.astype(jnp.bfloat16), p)
        return (h.astype(jnp.float32) ** 2).mean()

    return step_of(loss, layers(), normal(8, BATCH, WIDTH), tx=optax.adamw(1e-2))


def micro_batches():
    loss = loss_of_layers(block)

    def step(state, batches):
        def body(sums, x):
            value, gradients = jax.value_and_grad(loss)(state[0], x)
            return jax.tree.map(jnp.add, sums, gradients), value

        sums, values = lax.scan(body, jax.tree.map(jnp.zeros_like, state[0]), batches)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, state[0], sums),), values.mean()

    return step, ((layers(),), normal(8, 3, BATCH, WIDTH))


def updates_in_a_scan():
    """A gradient, through layers that are worth segments, and an update in every turn."""

    def loss(params, x):
        for w in params:
            x = jnp.tanh(jnp.sin(x @ w))
        return (x**2).mean()

    def step(state, batches):
        def body(params, x):
            gradients = jax.grad(loss)(params, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), None

        return (lax.scan(body, state[0], batches)[0],), jnp.float32(0)

    return step, (([normal(i, 16, 16) for i in range(12)],), normal(20, 3, 512, 16))


def handed_back():
    """Checkpointed layers that hand back their weights, what they were given and a count; the update reads these, as
    that of `nnx.scan(nnx.remat(f))` does."""

    def step(state, x):
        def loss(p):
            layer = jax.checkpoint(lambda carry, w: ((block(w, carry[0]), carry[1] + 1.0), (w, carry[0])))
            (h, count), stacks = lax.scan(layer, (x, 0.0), p)
            return (h**2).mean(), (count, stacks)

        (value, (count, (p, hs))), gradients = jax.value_and_grad(loss, has_aux=True)(state[0])
        return (jax.tree.map(lambda p, g: p - 0.1 / count * g, p, gradients),), (value, hs)

    return step, ((layers(),), normal(8, BATCH, WIDTH))


def vmapped():
    def loss(p, xs):
        return (jax.vmap(lambda xs: rnn(p, xs)[0], in_axes=1)(xs) ** 2).mean()

    return step_of(loss, rnn_params(), sequence())


def second_order():
    """The gradient of a gradient penalty."""

    def loss(p, xs):
        penalty = jax.grad(lambda xs: (rnn(p, xs)[0] ** 2).mean())(xs)
        return (rnn(p, xs)[0] ** 2).mean() + (penalty**2).sum()

    return step_of(loss, rnn_params(), sequence())


def two_losses():
    """Two gradients through the same loop, as of a generator and its critic."""

    def step(state, xs):
        (p,) = state
        one = jax.grad(lambda p: (rnn(p, xs)[0] ** 2).mean())(p)
        other = jax.grad(lambda p: jnp.abs(rnn(p, xs)[1]).mean())(p)
        return (jax.tree.map(lambda a, b, c: a - 0.1 * b - 0.2 * c, p, one, other),), jnp.float32(0)

    return step, ((rnn_params(),), sequence())


def gradient_norm_reported():
    def reporting(state, x):
        value, gradients = jax.value_and_grad(loss_of_layers(block))(state[0], x)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state[0], gradients)
        return (new,), (value, optax.global_norm(gradients), gradients["w1"].mean(axis=(1, 2)))

    return reporting, ((layers(),), normal(8, BATCH, WIDTH))


def shared_layers():
    """Two loops over the same weights, so that the update needs the gradients of both."""

    def loss(p, x):
        one, _ = lax.scan(lambda h, w: (block(w, h), None), x, p)
        other, _ = lax.scan(lambda h, w: (block(w, jnp.sin(h)), None), x, p, reverse=True)
        return (one * other).mean()

    return step_of(loss, layers(), normal(8, BATCH, WIDTH), tx=optax.adam(1e-2))


MODELS = {
    "last hidden state": last_hidden,
    "all hidden states": all_hidden,
    "from the end": functools.partial(last_hidden, reverse=True),
    "unroll 2": functools.partial(last_hidden, unroll=2),
    "unroll all": functools.partial(last_hidden, unroll=True),
    "lstm": lstm,
    "stacked": stacked,
    "bidirectional": bidirectional,
    "encoder and decoder": encoder_decoder,
    "nested": nested,
    "layers": functools.partial(over_layers, block),
    "layers, adamw": functools.partial(over_layers, block, tx=optax.adamw(1e-2)),
    "layers, clipped by the global norm": functools.partial(
        over_layers, block, tx=optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    ),
    "layers, shared": shared_layers,
    "layers, lamb": functools.partial(over_layers, block, tx=optax.lamb(1e-2)),
    "layers, norm reported": gradient_norm_reported,
    "mixed precision": mixed_precision,
    "dropout keys": dropout_keys,
    "key in the carry": key_in_carry,
    "raw key in the carry": raw_key_in_carry,
    "integer carry": integer_carry,
    "cond": scanned_cond,
    "checkpoint on the body": lambda: over_layers(jax.checkpoint(block)),
    "checkpoint inside": checkpoint_inside,
    "checkpoint, weights handed back": handed_back,
    "checkpoint with a policy": checkpoint_with_policy,
    "custom_vjp": lambda: over_layers(lambda w, h: block(w, clipped(h))),
    "custom_jvp": lambda: over_layers(lambda w, h: h + jax.nn.relu6(h @ w["w1"]) @ w["w2"]),
    "flash attention": flash_attention,
    "pallas kernel": pallas_kernel,
    "fft and sort": fft_and_sort,
    "linear algebra": linear_algebra,
    "while": while_inside,
    "length one": length_one,
    "micro-batches": micro_batches,
    "vmapped": vmapped,
    "second order": second_order,
    "two losses": two_losses,
}
