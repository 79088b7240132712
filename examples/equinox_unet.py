"""A U-Net in Equinox that removes noise from generated images.

python examples/equinox_unet.py
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import remat_opt

OPTIMIZER = optax.adam(1e-3)


class Convs(eqx.Module):
    """Two convolutions."""

    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d

    def __init__(self, inputs, outputs, key):
        first, second = jax.random.split(key)
        self.first = eqx.nn.Conv2d(inputs, outputs, 3, padding=1, key=first)
        self.second = eqx.nn.Conv2d(outputs, outputs, 3, padding=1, key=second)

    def __call__(self, x):
        return jax.nn.silu(self.second(jax.nn.silu(self.first(x))))


class UNet(eqx.Module):
    """Down and up again, with what each level had on the way down."""

    down: list[Convs]
    up: list[Convs]
    middle: Convs
    last: eqx.nn.Conv2d

    def __init__(self, features, levels, key):
        keys = iter(jax.random.split(key, 2 * levels + 2))
        widths = [features * 2**level for level in range(levels)]
        self.down = [Convs(w // 2 if i else 1, w, next(keys)) for i, w in enumerate(widths)]
        self.middle = Convs(widths[-1], 2 * widths[-1], next(keys))
        self.up = [Convs(3 * w, w, next(keys)) for w in reversed(widths)]
        self.last = eqx.nn.Conv2d(features, 1, 1, key=next(keys))

    def __call__(self, x):
        kept = []
        for convs in self.down:
            kept.append(convs(x))
            x = eqx.nn.MaxPool2d(2, 2)(kept[-1])
        x = self.middle(x)
        for convs, across in zip(self.up, reversed(kept), strict=True):
            larger = jax.image.resize(x, (x.shape[0], *across.shape[1:]), "nearest")
            x = convs(jnp.concatenate([across, larger]))
        return self.last(x)


@eqx.filter_jit(donate="all-except-first")
def train_step(data, model, moments):
    """Gradients and the update."""
    noisy, clean = data

    def loss_of(model):
        return jnp.mean((jax.vmap(model)(noisy) - clean) ** 2)

    loss, grads = eqx.filter_value_and_grad(loss_of)(model)
    updates, moments = OPTIMIZER.update(grads, moments, model)
    return eqx.apply_updates(model, updates), moments, loss


def main():
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    model = UNet(options.features, options.levels, jax.random.key(0))
    moments = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    place = jnp.linspace(0, 6, options.size)
    clean = jnp.sin(place + jnp.arange(options.batch)[:, None, None, None]) * jnp.cos(place)[:, None]
    data = clean + jax.random.normal(jax.random.key(1), clean.shape), clean
    step = remat_opt.optimize(train_step)
    print(remat_opt.measure(train_step, data, model, moments))
    for number in range(options.steps):
        model, moments, loss = step(data, model, moments)
        print(f"step {number}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
